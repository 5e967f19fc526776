"""Single-step fill-in GRPO. A model fills all blanks at once, and learns to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

`grpo_step` is Algorithm 1 of DeepSeekMath (2402.03300). `main` is the whole run around it. The same
thing in one short file is grpo/one_file.py. From Python:

    from train_grpo import main
    table = main("config/quick.py --kl_beta=0", quiet=True)

Shapes: B masked inputs, T characters of each, G completions of each input.
"""

import os
import sys
import time

# Threads that wait should sleep. Beside another busy program, spinning ones make a step twice as
# slow. PyTorch reads this when it's imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from data.user_mistake import Mistake, exit_on_mistake
from grpo.advantage import compute_advantages
from grpo.batch import draw_batch, minibatches
from grpo.distributed import is_first, join_processes
from grpo.evaluation.evaluate import evaluate, peek, try_out
from grpo.evaluation.table import format_table
from grpo.loss import blanks_that_learn, grpo_loss, loss_weights
from grpo.metrics import Rollout, UpdateMetrics, check_finite, rollout_metrics, to_floats
from grpo.optimizer import Optimizer, learning_rate, make_adamw, update_reference
from grpo.run.checkpoint import load_checkpoint, save_checkpoint, save_on_error
from grpo.run.config import load_config
from grpo.run.load import load_data, load_models, load_rewards
from grpo.run.log import Log
from grpo.run.network import pick_device
from grpo.run.origin import made_with
from grpo.run.snapshots import begin_snapshots, record_snapshot


def grpo_step(policy, reference, rewards, optimizer, batch, config):
    """Take one step of GRPO on B masked inputs. Returns its `Rollout` and its metrics.

    By default a character y with the reward r has the advantage A and the loss

        A    = r - (the mean reward of the other G - 1 completions of this input)
        loss = -min(ρ·A, clip(ρ, 0.8, 1.2)·A) + 0.25 · KL(q‖q_ref),    ρ = q(y) / q_old(y)

    averaged over the blanks of each completion, then over completions.

    policy(batch)    runs the network and returns q, a distribution over completions of the inputs.
                     By default all blanks are independent, and it's a `Product` (grpo/policy.py)
    reference(batch) returns q_ref, the same kind of distribution; by default the base model's
    rewards          a `Rewards` (grpo/reward.py): what each completion earns; by default that's the
                     judge's score
    optimizer        an `Optimizer` (grpo/optimizer.py)
    batch            a `Batch` (grpo/batch.py): the inputs, and the random numbers that fill them.
                     batch.mask (B,T) is True at a blank
    config           the settings (grpo/run/config.py)

    Below, `sample` holds the completions (B,G,T). `old` and `now` are their `LogProbs` when they
    were drawn and in the current update: logp and ref_logp (B,G,T) are the log-probabilities of
    each character under the policy and the reference, kl and entropy (B,T) are exact, for each
    blank.
    """
    # 1. Sample. No blank sees how another one is filled, so the network's input doesn't depend on
    #    the draw: one forward pass per input serves all of its G completions.
    with torch.no_grad():
        q_old = policy(batch)
        q_ref = reference(batch)
        sample = q_old.sample()
        old = q_old.log_probs(sample, q_ref)

    # 2. Judge. By default a frozen classifier reads each completion, and says in log-odds whether
    #    it's real or the base model filled it in.
    reward, parts = rewards(sample.completions, batch)  # (B,G), {name: (B,G)}

    # 3. Compare.
    advantages = compute_advantages(reward, config)  # (B,G)

    # 4. Update. The weights turn a sum over all blanks into the average we want. By default a blank
    #    weighs 1 / (B · blanks of its input), and all of them learn.
    learns = blanks_that_learn(old.entropy, batch.mask, config)  # (B,T)
    metrics = UpdateMetrics()
    for epoch in range(config.num_iterations):
        for inputs in minibatches(batch, epoch, config):  # (b,) their numbers
            weights = loss_weights(batch.mask[inputs], config)  # (b,T)
            loss_of_update = 0.0
            # Micro-batches of at most batch_size inputs, so that the activations fit into memory.
            # Their gradients add up, just like their losses.
            size = config.batch_size
            for rows, weight in zip(inputs.split(size), weights.split(size)):
                now = policy(batch[rows]).log_probs(sample[rows], q_ref[rows])
                mask = batch.mask[rows]
                loss, figures = grpo_loss(
                    now, old[rows], advantages[rows], learns[rows], mask, weight, config
                )
                loss.backward()
                loss_of_update += loss.detach()
                metrics.add(now, old[rows], figures, mask)
            # Clip the gradient, take a step of AdamW, clear the gradient. If the loss or gradient
            # isn't finite, no weight changes, and `main` ends the run when it sees the metrics.
            grad_norm = optimizer.step_if_finite(loss_of_update)
            metrics.end_update(grad_norm)
    return Rollout(batch, sample, old, reward, parts, advantages), metrics.result()


def main(arguments=(), quiet=False):
    """Make one run: read its settings, train, and measure the result. Returns the table, a dict.

    `arguments` are config files and flags, as on the command line: a list, or one text that we
    split at spaces. With `quiet` there's neither a bar nor a printed table. Of several processes,
    only the first one returns the table.

    A user's mistake raises a `Mistake`, if at all possible before the run's folder is touched.
    During training the first Ctrl-C or SIGTERM finishes the step, saves it and ends the program. A
    second one ends it at once.
    """
    # Config files and flags. With --init_from=resume they change the settings of the checkpoint.
    config = load_config(arguments.split() if isinstance(arguments, str) else arguments)
    device = pick_device(config.device)
    join_processes(device)  # under torchrun each process has a GPU of its own

    # `policy` learns. `reference`, by default a frozen copy of the base model, is what the KL
    # compares it with. The table compares it with `base`. `judge` maps completions to scores. When
    # a run is resumed, `load_checkpoint` below puts policy and reference where they were.
    models = load_models(config, device)
    policy, reference = models.policy, models.reference
    train, held_out = load_data(config, device)
    rule = held_out.rule  # the referee
    rewards = load_rewards(config, models.judge, models.base, rule, device)
    # What would fail in the table, or on the first inputs, fails now.
    try_out(models, rewards, held_out, draw_batch(train, config, 0, device)[:2])
    optimizer = Optimizer(make_adamw(policy.network, config), config.grad_clip)

    config.made_with = made_with(config)  # by content: a file may change under the same name
    start = 0
    if config.init_from == "resume":  # restores weights, reference and moments
        start = load_checkpoint(config, policy, reference, optimizer)
    # This opens the folder. From here on Ctrl-C only asks us to stop.
    with Log(config, start, held_out.rule_name, quiet) as log:
        if is_first():  # of several processes
            begin_snapshots(models.base, held_out, config, start)  # what grpo.tools.replay shows
            log.say(peek(models, rewards, held_out, start))
        for step in range(start, config.max_iters):
            began = time.perf_counter()
            lr = learning_rate(step, config)
            optimizer.set_learning_rate(lr)
            # The inputs and random numbers of a step depend on (seed, step) and nothing else. Each
            # process draws all of them and keeps its share.
            batch = draw_batch(train, config, step, device)
            with save_on_error(config, policy, reference, optimizer, step):
                rollout, metrics = grpo_step(policy, reference, rewards, optimizer, batch, config)
                metrics = to_floats(rollout_metrics(rollout, rule) | metrics)
                check_finite(metrics, step)  # a NaN ends the run here
            # With reference_mode=ema or periodic the reference follows the policy.
            update_reference(reference.network, policy.network, step + 1, config)
            metrics["lr"] = lr
            metrics["step_ms"] = 1000 * (time.perf_counter() - began)
            log.write(step, metrics)
            if is_first():
                record_snapshot(policy, held_out, config, step)
            stop = log.stop_requested()  # the signal, or 0; all processes agree
            due = step + 1 == config.max_iters or (step + 1) % config.eval_interval == 0
            if stop or due:
                save_checkpoint(config, policy, reference, optimizer, step + 1)
            if stop:
                break
            if is_first() and due:
                log.say(peek(models, rewards, held_out, step + 1))
        log.end_training()  # everything is saved: from here on Ctrl-C ends the program at once
        stop = log.stop_requested()
        if stop:
            sys.exit(128 + stop)  # `log` says how to resume
        if not is_first():
            return None
        # How much is correct on held-out inputs, before and after? And what does the judge think?
        result, completions = evaluate(models, rewards, held_out, quiet=quiet)
        judge_pays = "judge" in rewards.parts
        log.table(result, completions, format_table(result, held_out.rule_name, judge_pays))
    return result


if __name__ == "__main__":
    with exit_on_mistake("train_grpo.py"):  # prints a mistake in one line, exits with code 2
        if len(sys.argv) == 1:
            raise Mistake("name a config: python train_grpo.py config/grpo_config.py")
        main(sys.argv[1:])
