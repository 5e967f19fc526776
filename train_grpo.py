"""Single-step fill-in GRPO. A model fills all blanks at once, and learns to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

`grpo_step` is the algorithm (DeepSeekMath, 2402.03300, Algorithm 1), and `main` is the whole run.
grpo/README.md says where this departs from the paper, and why.

Shapes: B masked inputs, T characters of each, G completions of each input.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from grpo.advantage import group_advantages, keep_uncertain
from grpo.batch import Rollout, draw_batch, micro_batches, minibatches
from grpo.cuda.kernel import choose
from grpo.distributed import join, pick_device, total_over_processes
from grpo.evaluation.evaluate import hold_out, peek, table, try_rewards
from grpo.loss import grpo_loss, loss_weights
from grpo.metrics import StepMetrics, as_numbers, check_weights, text_metrics
from grpo.optimizer import Optimizer, learning_rate
from grpo.plumbing.checkpoint import LATEST, load_model, read, restore_training, save_training
from grpo.plumbing.command_line import exit_on_mistake
from grpo.plumbing.config import load_config
from grpo.plumbing.load import load_data, load_models, load_rewards
from grpo.plumbing.log import Clock, Log
from grpo.policy import Policy, make_judge, pick_compile, pick_dtype
from grpo.reference import make_reference, update_reference
from grpo.tools import replay


def grpo_step(policy, reference, rewards, optimizer, batch, config):
    """Take one step of GRPO on B masked inputs. Returns its `Rollout` and its metrics.

    policy(batch)    a distribution over the fills of the inputs. In `Product`, the default, all
                     blanks are independent (grpo/product_policy.py). `Latent` first draws an
                     integer z for each hidden word, and given z the letters of the word are
                     independent (grpo/latent_policy.py).
    reference(batch) the same kind of distribution, from the frozen base model by default
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

    # 2. Judge. By default a frozen classifier estimates log(p/q) of every hidden word: how much
    #    likelier its spelling is in real text (p) than from the base model (q). That is the
    #    reward of each letter of the word. With credit=input a letter gets the sum over all words.
    reward, for_the_log = rewards(fills, batch, config.credit)  # (B,G,T), {name: (B,G)}

    # 3. Compare. By default an advantage is the reward minus the mean reward of the same word in
    #    the other G - 1 completions. With top_entropy_quantile=0.2 only the most uncertain fifth of
    #    the blanks keeps its advantages, and the others get 0. By default all keep them.
    advantages = group_advantages(reward, batch.mask, config)  # (B,G,T)
    advantages = keep_uncertain(advantages, old.entropy, batch.mask, config.top_entropy_quantile)

    # 4. Update. A letter has the ratio ρ = exp(now.logp - old.logp) and the advantage A. By
    #    default the loss is Σ weights · (-min(ρ·A, clip(ρ, 0.8, 1.2)·A) + kl_beta · KL).
    metrics = StepMetrics(for_the_log, advantages, batch.mask)
    for epoch in range(config.num_iterations):
        for rows in minibatches(batch, epoch, config):  # all inputs at once, or shuffled parts
            blanks = total_over_processes(batch.mask[rows].sum()).clamp(min=1)
            weights = loss_weights(batch.mask[rows], blanks, config)  # (B,T) one for each blank
            loss_of_update = 0.0
            # Take at most batch_size inputs at a time, so that their activations fit into memory.
            for micro, weight in micro_batches(rows, weights, config.batch_size):
                now = policy(batch[micro]).score(fills[micro], q_ref[micro])
                loss, terms = grpo_loss(
                    now, old[micro], advantages[micro], batch.words[micro], weight, config
                )
                loss.backward()  # the gradients of micro-batches add up, as their losses do
                loss_of_update += loss.detach()
                metrics.add(now, old[micro], terms, blanks)
            # This adds up the gradients of all processes, clips them, takes AdamW's step if they
            # are finite, and clears them.
            grad_norm = optimizer.step(loss_of_update)
            metrics.updated(grad_norm)
    return Rollout(batch, fills, old, reward, advantages), metrics.result()


def main(arguments):
    """Make one run: read its settings, train, and measure the result. Returns the table."""
    with exit_on_mistake("train_grpo.py"):  # prints a user's mistake in one line, exits with 2
        config = load_config(arguments)
        resumed = config.init_from == "resume"
        saved = read(Path(config.out_dir) / LATEST) if resumed else {}
        state = saved.get("training", {})
        device = pick_device(config.device)
        elsewhere = device
        if config.reference_device != "auto":
            elsewhere = pick_device(config.reference_device)
        config = replace(
            config,
            dtype=pick_dtype(config.dtype, device),
            compile=pick_compile(config.compile, device),
        )
        join(device)
        train, val = load_data(config.dataset, config.block_size, config.prompts_file)

        # Three networks: the generator, which learns, the base model, and the judge.
        generator, base, judge = load_models(config, train.vocabulary, saved)
        fused = choose(config, device, len(train.vocabulary), generator.n_latent)
        config = replace(config, kernel=fused)
        reference = make_reference(base, config.reference_mode, state.get("reference"))
        start = base  # the generator as it was before the first step
        if config.reference_checkpoint:
            start = load_model(config.generator_checkpoint, "generator", train.vocabulary)

        # A policy maps masked inputs to a distribution over their fills.
        clock = Clock(device)
        policy = Policy(generator, config, device)
        reference = Policy(reference, config, elsewhere)
        before = Policy(start, config, elsewhere)
        policy.call = clock.timed("policy", policy.call)
        reference.call = clock.timed("reference", reference.call)
        judge = clock.timed("judge", make_judge(judge, config, device))
        held_out = hold_out(config, train, val, device)
        rewards = load_rewards(config, judge, train.vocabulary, held_out.lexicon, device)
        try_rewards(judge, rewards, held_out)  # so that a faulty reward fails now
        optimizer = Optimizer(generator, config)
        # This seed is only for a user's reward function, in case it draws random numbers.
        torch.manual_seed(config.seed)
        if state:
            restore_training(state, optimizer.adamw, config.out_dir)

        with Log(config, state.get("iteration", 0), clock) as log:  # from here on we write files
            if log.records:
                replay.begin(before, held_out, config, log.start)
            log.say(peek(policy, before, held_out, log.start))
            for step in range(log.start, config.max_iters):
                log.begin_step(step)
                optimizer.set_learning_rate(learning_rate(step, config))
                batch = clock.timed("data", draw_batch)(train, config, step, device)
                rollout, metrics = grpo_step(policy, reference, rewards, optimizer, batch, config)
                # By default the reference stays as it is. With reference_mode=ema or periodic it
                # follows the policy.
                update_reference(reference.network, generator, step + 1, config)
                stop = log.signals.requested()
                numbers = as_numbers(metrics) | text_metrics(
                    rollout, rewards.decode, held_out.lexicon, cut=not config.prompts_file
                )
                log.metrics(step, numbers | {"lr": learning_rate(step, config)} | clock.read())
                if log.records:
                    replay.record(policy, held_out, config, step, rollout)
                last = step + 1 == config.max_iters
                if last or stop or (step + 1) % config.save_interval == 0:
                    check_weights(policy, held_out)
                    save_training(
                        config,
                        generator,
                        reference.network,
                        optimizer.adamw,
                        step + 1,
                        train.vocabulary,
                    )
                    log.saved = step + 1
                log.bar.update()
                if stop:
                    sys.exit(128 + stop)
                if last or (step + 1) % config.eval_interval == 0:
                    log.say(peek(policy, before, held_out, step + 1))
            log.bar.close()
            log.trained = time.monotonic()
            result, lines = table(
                policy, before, judge, rewards, held_out, config, log.exit_on_signal
            )
            log.table(result, lines)
        return result


if __name__ == "__main__":
    main(sys.argv[1:])
