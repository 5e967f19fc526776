"""Single-step fill-in GRPO. A model fills all blanks at once, and learns to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

`grpo_step` is the algorithm (DeepSeekMath, 2402.03300, Algorithm 1, but for some departures that
grpo/README.md gives reasons for), and `main` is the whole run around it. From Python:

    from train_grpo import main
    table = main(["config/quick.py", "--kl_beta=0"])

Shapes: B masked inputs, T characters of each, G completions of each input.
"""

import sys
import time

import torch

from data.user_mistake import refuse
from grpo.advantage import forward_advantages, group_advantages, keep_uncertain
from grpo.batch import draw_batch, micro_batches, minibatches
from grpo.distributed import join_processes, pick_device, total_over_processes
from grpo.evaluation.evaluate import evaluate, hold_out, peek, try_rewards
from grpo.loss import grpo_loss, loss_weights
from grpo.metrics import Rollout, StepMetrics, check_finite, text_metrics
from grpo.optimizer import Optimizer, learning_rate, make_adamw
from grpo.plumbing.checkpoint import load_checkpoint, save_checkpoint
from grpo.plumbing.config import exit_on_mistake, load_config
from grpo.plumbing.load import load_models, load_text, make_rewards
from grpo.plumbing.log import Log
from grpo.policy import Policy, make_judge
from grpo.reference import update_reference
from grpo.tools import replay


def grpo_step(policy, reference, rewards, optimizer, batch, config):
    """Take one step of GRPO on B masked inputs. Returns its `Rollout` and its metrics.

    policy(batch)    a distribution over the fills of the inputs. In `Product`, the default, all
                     blanks are independent (grpo/product_policy.py). `Latent` first draws an
                     integer z for each hidden word, and given z the letters of the word are
                     independent (grpo/latent_policy.py).
    reference(batch) the same kind of distribution, from the frozen base model by default
    rewards          a `Rewards`: what each blank of the fills earns, by default from the judge
    fills            `Fills`: completions (B,G,T), and a mask of the characters that top_k, top_p,
                     ... allow
    old, now         `Scores` of the fills when they were drawn, and in the current update. logp and
                     ref_logp (B,G,T) are the log-probabilities of each letter under the policy and
                     the reference, renormalised over the allowed characters. kl and entropy (B,T)
                     are exact, for each blank. Under `Latent`, logp is the log-probability of a
                     letter given the earlier letters of its word, with z summed out. kl and entropy
                     then include those of z, at the first blank of a word.
    batch.mask       (B,T) bool, True at a blank
    batch.words      (B,T) int: 1 in the first hidden word of an input, 2 in the second, ..., and 0
                     in the visible text. A hidden word is a run of blanks.
    batch.uniforms   (B,G,T,2) random numbers. [..., 0] draws the letter of each blank. [..., 1]
                     draws the z of each word. Only the number at a word's first blank is used.
    """
    # 1. Sample. All blanks are filled at once, so no fill changes the input of the network. One
    #    forward pass per input therefore serves all of its G completions.
    with torch.no_grad():
        q_old = policy(batch)
        q_ref = reference(batch)
        fills = q_old.sample(batch.uniforms)
        old = q_old.score(fills, q_ref)  # only old.ref_logp and old.kl use q_ref

    # 2. Judge. By default a frozen classifier estimates, for every hidden word, how much likelier
    #    its spelling is in real text than from the base model, as a logarithm. That is the reward
    #    of each letter of the word. With credit=input a letter gets the sum over all words.
    reward, parts = rewards(fills, batch, config.credit)  # (B,G,T), {name: (B,G)}

    # 3. Compare. By default an advantage is the reward minus the mean reward of the same word in
    #    the other G - 1 completions. With top_entropy_quantile=0.2 only the most uncertain fifth of
    #    the blanks keeps its advantages, and the others get 0. By default all keep them.
    advantages = group_advantages(reward, batch.mask, config)  # (B,G,T)
    if config.direction == "forward":
        # Instead, weigh each fill by how likely the goal, q_ref · exp(reward), would write it.
        advantages = forward_advantages(reward, old, batch.words)
    advantages = keep_uncertain(advantages, old.entropy, batch.mask, config.top_entropy_quantile)

    # 4. Update. A letter has the ratio ρ = exp(now.logp - old.logp) and the advantage A. By
    #    default the loss is the mean of -min(ρ·A, clip(ρ, 0.8, 1.2)·A) + kl_beta · KL over all
    #    letters drawn. `weights` count G, too, so that the sum over micro-batches is this mean.
    #    `batch.words` matters only to objectives that average ρ over a word.
    metrics = StepMetrics(parts, advantages, batch.mask)
    for epoch in range(config.num_iterations):
        for rows in minibatches(batch, epoch, config):  # all inputs at once, or shuffled parts
            n_blanks = total_over_processes(batch.mask[rows].sum()).clamp(min=1)
            weights = loss_weights(batch.mask[rows], n_blanks, config)  # (B,T) one for each blank
            loss_of_update = 0.0
            # Take at most batch_size inputs at a time, so that their activations fit into memory.
            for some, weight in micro_batches(rows, weights, config.batch_size):
                now = policy(batch[some]).score(fills[some], q_ref[some])
                loss, terms = grpo_loss(
                    now, old[some], advantages[some], batch.words[some], weight, config
                )
                loss.backward()  # the gradients of micro-batches add up, as their losses do
                loss_of_update += loss.detach()
                metrics.add(now, old[some], terms, n_blanks)
            # This adds up the gradients of all processes, clips them, takes AdamW's step unless
            # the loss or a gradient is not finite, and clears them.
            grad_norm = optimizer.step(loss_of_update)
            metrics.updated(grad_norm)
    return Rollout(batch, fills, old, reward, advantages), metrics.result()


def main(arguments=()):
    """Make one run: read its settings, train, and measure the result. Returns the table, a dict.

    A user's mistake raises a `Mistake` before any file is written. During training the first Ctrl-C
    or SIGTERM lets the step finish, saves it and ends the program. A second one ends it at once.
    """
    # Config files and flags. A resumed run reads the settings of its checkpoint first, then flags.
    config = load_config(arguments)
    device = pick_device(config.device)
    join_processes(device)  # under torchrun each process has a GPU of its own

    # Four networks: the generator, which learns, a copy that stays as it was, the reference from
    # which the KL is measured, by default one more copy, and the judge.
    generator, base, anchor, judge = load_models(config)
    train, val = load_text(config)

    # A policy maps masked inputs to a distribution over their fills.
    policy = Policy(generator, config, device)
    before = Policy(base, config, device)  # for comparison
    reference = Policy(anchor, config, pick_device(config.reference_device or config.device))
    judge = make_judge(judge, config, device)
    held_out = hold_out(config, train, val, device)
    rewards = make_rewards(config, judge, held_out.lexicon, device)
    try_rewards(judge, rewards, held_out)  # a faulty reward fails now and not in the first step
    optimizer = Optimizer(make_adamw(generator, config), config.grad_clip)
    torch.manual_seed(config.seed)  # for a reward of your own; all else depends on (seed, step)

    start = 0
    if config.init_from == "resume":  # restores weights, reference, moments and random generator
        start = load_checkpoint(config, policy, reference, optimizer)
    with Log(config, start) as log:  # opens the folder; from here on Ctrl-C only asks us to stop
        if config.replay:
            replay.begin(before, held_out, config, start)
        log.say(peek(policy, before, held_out, start))
        for step in range(start, config.max_iters):
            began = time.perf_counter()
            optimizer.set_learning_rate(learning_rate(step, config))
            batch = draw_batch(train, config, step, device)  # a function of (seed, step) alone
            rollout, metrics = grpo_step(policy, reference, rewards, optimizer, batch, config)
            # By default the reference stays as it is. With reference_mode=ema or periodic it
            # follows the policy.
            update_reference(reference.network, generator, step + 1, config)
            metrics = check_finite(metrics, step)  # tensors to numbers; a NaN ends the run here
            metrics |= text_metrics(rollout, held_out.lexicon, cut=not config.prompts_file)
            metrics["lr"] = learning_rate(step, config)
            metrics["step_ms"] = 1000 * (time.perf_counter() - began)
            log.write(step, metrics)
            if config.replay:
                replay.record(policy, held_out, config, step, rollout)
            stop = log.stop_requested()  # the signal, or 0; all processes agree
            last = step + 1 == config.max_iters
            if stop or last or (step + 1) % config.save_interval == 0:
                save_checkpoint(config, policy, reference, optimizer, step + 1)
            if stop:
                sys.exit(128 + stop)  # `log` says how to go on
            if last or (step + 1) % config.eval_interval == 0:
                log.say(peek(policy, before, held_out, step + 1))
        log.end_training()  # all is saved, so from here on Ctrl-C ends the program at once
        result, fills = evaluate(policy, before, judge, rewards, held_out, config)
        log.table(result, fills)
    return result


if __name__ == "__main__":
    with exit_on_mistake("train_grpo.py"):  # prints a mistake in one line, exits with code 2
        usage = "for example: python train_grpo.py config/grpo_config.py --group_size=16"
        refuse(len(sys.argv) == 1, f"name a config file or a flag, {usage}")
        main(sys.argv[1:])
