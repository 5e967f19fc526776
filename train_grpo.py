"""Single-step fill-in GRPO. A model fills all blanks at once, and learns to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

`grpo_step` is the body of Algorithm 1 in DeepSeekMath (2402.03300). `main` is the whole run around
it. The same thing in one short file is grpo/one_file.py. From Python:

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

from data.user_mistake import Mistake, run_program
from grpo.advantage import compute_advantages
from grpo.batch import draw_batch, inputs_of_updates
from grpo.distributed import is_first, join_processes, largest_of_processes
from grpo.evaluation.evaluate import evaluate, peek
from grpo.evaluation.table import format_table
from grpo.loss import blanks_that_learn, grpo_loss, loss_weights
from grpo.metrics import Rollout, check_finite, rollout_metrics, to_floats, update_metrics
from grpo.optimizer import Optimizer, learning_rate, make_adamw, update_reference
from grpo.run.checkpoint import SAVE_EVERY, load_checkpoint
from grpo.run.config import load_config
from grpo.run.fingerprint import made_by
from grpo.run.load import load_data, load_models, load_rewards, pick_device, warnings
from grpo.run.log import Log
from grpo.run.signals import StopSignals


def grpo_step(policy, reference, rewards, optimizer, batch, config):
    """Take one step of GRPO on B masked inputs.

    Returns its `Rollout`, the figures of each micro-batch, and the gradient norm of each update.

    By default a character y with the reward r has the advantage A and the loss

        A    = r - (the mean reward of the other G - 1 completions of this input)
        loss = -min(ρ·A, clip(ρ, 0.8, 1.2)·A) + 0.25 · KL(q‖q_ref),    ρ = q(y) / q_old(y)

    averaged over the blanks of each completion, then over completions.

    policy     policy(masked) runs the network on inputs (B,T) and returns q, a distribution over
               their completions. By default all blanks are independent (grpo/policy.py)
    reference  reference(masked) returns q_ref, the same kind of distribution; by default it's the
               base model's
    rewards    a `Rewards` (grpo/reward.py): what a completion earns, by default the judge's score
    optimizer  an `Optimizer` (grpo/optimizer.py)
    batch      a `Batch` (grpo/batch.py): the inputs, and the random numbers that fill them.
               batch.mask (B,T) is True at a blank
    config     the settings (grpo/run/config.py)

    Below, `sample` holds the completions (B,G,T). `old` and `now` are their `LogProbs` when they
    were drawn and in the current update: logp and ref_logp (B,G,T) are the log-probabilities of
    each character under the policy and the reference, kl and entropy (B,T) are exact, for each
    blank.
    """
    # 1. Sample. No blank sees how another one is filled, so the network's input doesn't depend on
    #    the draw: one forward pass per input serves all of its G completions.
    with torch.no_grad():
        q_old, q_ref = policy(batch.masked), reference(batch.masked)
        sample = q_old.sample(batch)
        old = q_old.log_probs(sample, q_ref)

    # 2. Reward. By default a judge, a frozen classifier, reads each completion, and says in
    #    log-odds whether it's real or the base model filled it in.
    reward, parts = rewards(sample.completions, batch)  # (B,G), {name: (B,G)}

    # 3. Compare.
    advantages = compute_advantages(reward, config)  # (B,G)

    # 4. Update. The weights turn a sum over all blanks into the average we want. By default a blank
    #    weighs 1 / (B · blanks of its input), and all of them learn.
    learns = blanks_that_learn(old.entropy, batch.mask, config)  # (B,T)
    figures, norms = [], []
    for chosen in inputs_of_updates(batch, config):  # (b,) the numbers of the inputs
        weights = torch.zeros(batch.mask.shape, device=batch.mask.device)  # (B,T)
        weights[chosen] = loss_weights(batch.mask[chosen], config)
        loss_of_update = 0.0
        # Micro-batches of at most batch_size inputs, so that the activations fit into memory. Their
        # gradients add up, just like their losses.
        for rows in chosen.split(config.batch_size):
            now = policy(batch.masked[rows]).log_probs(sample[rows], q_ref[rows])
            loss, found = grpo_loss(
                now,
                old[rows],
                advantages[rows],
                learns[rows],
                batch.mask[rows],
                weights[rows],
                config,
            )
            loss.backward()
            loss_of_update += loss.detach()
            figures.append(found)
        # Clip the gradient, take a step of AdamW, clear the gradient. If the loss or gradient isn't
        # finite, no weight changes, and `main` ends the run when it sees the metrics.
        norms.append(optimizer.step_if_finite(loss_of_update))
    return Rollout(batch, sample, old, reward, parts, advantages), figures, norms


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
    # compares it with. The table compares it with `base`. `judge` maps completions to scores.
    models = load_models(config, device)
    policy, reference = models.policy, models.reference
    train, held_out = load_data(config, policy.network.vocab_size, device)
    rewards = load_rewards(config, models, held_out.rule, device)
    optimizer = Optimizer(make_adamw(policy.network, config), config.grad_clip)
    start, before = 0, None
    if config.init_from == "resume":  # restores weights, reference and moments
        start, before = load_checkpoint(config, policy, reference, optimizer)
        if start > config.max_iters:
            raise Mistake(f"max_iters={config.max_iters}, but {start} steps are done; raise it")
    # This calls a reward of yours. If that fails, then here, before we write anything.
    look = peek(models, rewards, held_out, start)

    # This opens the run's folder.
    with Log(config, made_by(config, before), start, held_out, quiet) as log:
        log.say("\n".join([*warnings(config, train, held_out), look]))
        if is_first() and start == 0:
            log.snapshot(models.base, -1)  # for grpo.tools.replay
        with StopSignals() as signals:  # Ctrl-C only asks us to stop
            for step in range(start, config.max_iters):
                began = time.perf_counter()
                lr = learning_rate(step, config)
                optimizer.set_learning_rate(lr)
                # The inputs and random numbers of a step depend on (seed, step) and nothing else.
                # Each process draws all of them and keeps its share.
                torch.manual_seed((config.seed << 32) + step)  # for rewards that ask PyTorch
                batch = draw_batch(train, config, step, device)
                rollout, figures, norms = grpo_step(
                    policy, reference, rewards, optimizer, batch, config
                )
                metrics = rollout_metrics(rollout, held_out.rule) | update_metrics(figures, norms)
                metrics = to_floats(metrics)
                check_finite(metrics, step)  # a NaN ends the run here
                # With reference_mode=ema or periodic the reference follows the policy.
                done = step + 1
                update_reference(reference.network, policy.network, done, config)
                metrics["lr"] = lr
                metrics["step_ms"] = 1000 * (time.perf_counter() - began)
                log.write(step, metrics, policy)
                last = done == config.max_iters
                if is_first() and (last or done % config.eval_interval == 0):
                    log.say(peek(models, rewards, held_out, done))
                if last or done % SAVE_EVERY == 0:
                    log.save(policy, reference, optimizer, done)
                stop = largest_of_processes(signals.received, device)  # 0, or the signal
                if stop:
                    log.save(policy, reference, optimizer, done)
                    sys.exit(128 + stop)  # `log` says how to resume
        if not is_first():
            return None
        # How much is correct on held-out inputs, before and after? And what does the judge think?
        result, completions = evaluate(models, rewards, held_out)
        log.table(result, completions, format_table(result))
    return result


if __name__ == "__main__":
    run_program(main)
