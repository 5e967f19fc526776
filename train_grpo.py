"""Single-step fill-in GRPO. A model fills all blanks at once, and learns to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

`grpo_step` is Algorithm 1 of DeepSeekMath (2402.03300), with a few departures, which grpo/README.md
lists and gives reasons for. `main` is the whole run around it. From Python:

    from train_grpo import main
    table = main(["config/quick.py", "--kl_beta=0"])

Shapes: B masked inputs, T characters of each, G completions of each input.
"""

import sys
import time

import torch

from data.user_mistake import exit_on_mistake, refuse
from grpo.advantage import forward_advantages, group_advantages, keep_uncertain
from grpo.batch import draw_batch, minibatches
from grpo.distributed import join_processes, pick_device, total_over_processes
from grpo.evaluation.evaluate import evaluate, hold_out, peek, try_rewards
from grpo.loss import grpo_loss, loss_weights
from grpo.metrics import Rollout, StepMetrics, check_finite, text_metrics
from grpo.optimizer import Optimizer, learning_rate, make_adamw
from grpo.plumbing.checkpoint import load_checkpoint, save_checkpoint
from grpo.plumbing.config import load_config
from grpo.plumbing.load import load_models, load_text, make_rewards
from grpo.plumbing.log import Log
from grpo.policy import Policy, make_judge
from grpo.reference import update_reference
from grpo.tools import replay


def grpo_step(policy, reference, rewards, optimizer, batch, config):
    """Take one step of GRPO on B masked inputs. Returns its `Rollout` and its metrics.

    By default a letter y with the reward r has the advantage A and the loss

        A    = r - (the mean reward of the same word in the other G - 1 completions)
        loss = -min(ρ·A, clip(ρ, 0.8, 1.2)·A) + 0.65 · KL(q‖q_ref),    ρ = q(y) / q_old(y)

    which is averaged over the blanks of each completion, and then over completions.

    policy(batch)    q, a distribution over the fills of the inputs. By default all blanks are
                     independent (grpo/product_policy.py). `Latent` first draws an integer z for
                     each hidden word, and then its letters (grpo/latent_policy.py).
    reference(batch) q_ref, the same kind of distribution, by default from the frozen base model
    rewards          a `Rewards`: what each blank of the fills earns, by default from the judge
    fills            `Fills`: completions (B,G,T), and a mask of the characters that top_k, top_p,
                     ... allow
    old, now         `Scores` of the fills when they were drawn, and in the current update. logp and
                     ref_logp (B,G,T) are the log-probabilities of each letter under the policy and
                     the reference, renormalised over the allowed characters. kl and entropy (B,T)
                     are exact, for each blank.
    batch.mask       (B,T) bool, True at a blank
    batch.words      (B,T) int: 1 in the first hidden word of an input, 2 in the second, ..., and 0
                     in the visible text. A hidden word is a run of blanks.
    batch.uniforms   (B,G,T,2) random numbers. [..., 0] draws the letter of each blank, and
                     [..., 1], at the first blank of a word, draws its z.
    """
    # 1. Sample. All blanks are filled at once, so no fill changes the input of the network. One
    #    forward pass per input therefore serves all of its G completions.
    with torch.no_grad():
        q_old = policy(batch)
        q_ref = reference(batch)
        fills = q_old.sample(batch.uniforms)
        old = q_old.score(fills, q_ref)  # q_ref gives old.ref_logp and old.kl

    # 2. Judge. By default a frozen classifier reads each completion. It estimates log(p / q_ref) of
    #    every hidden word, where p is its probability in real text. That is the reward of each
    #    letter of the word. With credit=input a letter gets the sum over all words of its input.
    reward, parts = rewards(fills, batch, config.credit)  # (B,G,T), {name: (B,G)}

    # 3. Compare each fill with the rest of its group.
    if config.direction == "reverse":  # the default: GRPO follows the reverse KL
        advantages = group_advantages(reward, batch.mask, config)  # (B,G,T)
    else:  # the forward KL: weigh each fill by how likely the best policy would write it
        advantages = forward_advantages(reward, old, batch.words)  # (B,G,T)
    # Only the most uncertain blanks keep their advantages, by default all of them.
    advantages = keep_uncertain(advantages, old.entropy, batch.mask, config.top_entropy_quantile)

    # 4. Update, by default twice. `weights` turns the sum of the losses of all blanks into their
    #    average, however the update is cut into micro-batches. By default the weight of a blank is
    #    1 / (B · G · blanks of its input), where B counts the inputs of all processes. Other
    #    averages divide by n_blanks.
    metrics = StepMetrics(parts)
    for epoch in range(config.num_iterations):
        for rows in minibatches(batch, epoch, config):  # all inputs at once, or shuffled parts
            n_blanks = total_over_processes(batch.mask[rows].sum()).clamp(min=1)
            weights = loss_weights(batch.mask[rows], n_blanks, config)  # (B,T), 0 at visible text
            loss_of_update = 0.0
            # Take at most batch_size inputs at a time, so that their activations fit into memory.
            micro_batches = zip(rows.split(config.batch_size), weights.split(config.batch_size))
            for some, weight in micro_batches:
                now = policy(batch[some]).score(fills[some], q_ref[some])
                loss, terms = grpo_loss(
                    now, old[some], advantages[some], batch.words[some], weight, config
                )
                loss.backward()  # the gradients of micro-batches add up, as their losses do
                loss_of_update += loss.detach()
                metrics.add(now, old[some], terms, n_blanks)
            # This adds up the gradients of all processes, clips their norm, takes a step of AdamW
            # if loss and gradients are finite, and clears the gradients in any case. If they are
            # not finite, the norm or the loss tells `main`, which ends the run.
            grad_norm = optimizer.step(loss_of_update)
            metrics.updated(grad_norm)
    return Rollout(batch, fills, old, reward, advantages), metrics.result()


def main(arguments=()):
    """Make one run: read its settings, train, and measure the result. Returns the table, a dict.

    A user's mistake raises a `Mistake` before any file is written. During training the first Ctrl-C
    or SIGTERM lets the step finish, saves it and ends the program. A second one ends it at once.
    """
    # Config files and flags. With --init_from=resume they change the settings of the checkpoint.
    config = load_config(arguments)
    device = pick_device(config.device)
    join_processes(device)  # under torchrun each process has a GPU of its own

    # The files are those that the run began with, also if it is resumed. The generator learns.
    # `base` is a frozen copy, to compare before and after with. `anchor` is the network that the KL
    # is measured from, by default one more copy. The judge scores.
    generator, base, anchor, judge_network = load_models(config)
    train, val = load_text(config)

    # A policy maps masked inputs to a distribution over their fills.
    policy = Policy(generator, config, device)
    before = Policy(base, config, device)
    reference = Policy(anchor, config, pick_device(config.reference_device or config.device))
    judge = make_judge(judge_network, config, device)  # maps texts to log-odds
    held_out = hold_out(config, train, val, device)
    rewards = make_rewards(config, judge, held_out.lexicon, device)
    try_rewards(judge, rewards, held_out)  # a faulty reward fails now and not in the first step
    optimizer = Optimizer(make_adamw(generator, config), config.grad_clip)
    torch.manual_seed(config.seed)  # nothing here uses it, but a reward of your own may

    start = 0
    if config.init_from == "resume":  # restores weights, reference, moments and random generator
        start = load_checkpoint(config, policy, reference, optimizer)
    with Log(config, start) as log:  # opens the folder; from here on Ctrl-C only asks us to stop
        replay.begin(before, held_out, config, start)  # for a page that shows how the run learned
        log.say(peek(policy, held_out, start))
        for step in range(start, config.max_iters):
            began = time.perf_counter()
            optimizer.set_learning_rate(learning_rate(step, config))
            # The inputs and random numbers of a step are a function of (seed, step) alone. Each
            # process draws them all and keeps its share.
            batch = draw_batch(train, config, step, device)
            rollout, metrics = grpo_step(policy, reference, rewards, optimizer, batch, config)
            # By default the reference stays as it is. With reference_mode=ema or periodic it
            # follows the policy.
            update_reference(reference.network, generator, step + 1, config)
            metrics = check_finite(metrics, step)  # tensors to numbers; a NaN ends the run here
            metrics |= text_metrics(rollout, held_out.lexicon, cut=not config.prompts_file)
            metrics["lr"] = learning_rate(step, config)
            metrics["step_ms"] = 1000 * (time.perf_counter() - began)
            log.write(step, metrics)
            replay.record(policy, held_out, config, step, rollout)
            stop = log.stop_requested()  # the signal, or 0; all processes agree
            last = step + 1 == config.max_iters
            if stop or last or (step + 1) % config.save_interval == 0:
                save_checkpoint(config, policy, reference, optimizer, step + 1)
            if stop:
                sys.exit(128 + stop)  # `log` says how to go on
            if last or (step + 1) % config.eval_interval == 0:
                log.say(peek(policy, held_out, step + 1))
        log.end_training()  # all is saved, so from here on Ctrl-C ends the program at once
        # How many hidden words of held-out texts are right now, or at least words? And before?
        result, fills = evaluate(policy, before, judge, rewards, held_out, config)
        log.table(result, fills)
    return result


if __name__ == "__main__":
    with exit_on_mistake("train_grpo.py"):  # prints a mistake in one line, exits with code 2
        usage = "for example: python train_grpo.py config/grpo_config.py --group_size=16"
        refuse(len(sys.argv) == 1, f"name a config file or a flag, {usage}")
        main(sys.argv[1:])
