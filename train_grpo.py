"""Single-step fill-in GRPO. A model fills all blanks at once, and learns to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

`grpo_step` is the algorithm (DeepSeekMath, 2402.03300, Algorithm 1), and `train` repeats it.
grpo/README.md says where this departs from the paper, and why.

Shapes: B masked inputs, T characters of each, G completions of each input.
"""

import sys

import torch

from grpo.advantage import group_advantages, keep_uncertain
from grpo.batch import Rollout, micro_batches, minibatches
from grpo.distributed import total_over_processes
from grpo.loss import grpo_loss, loss_weights
from grpo.metrics import StepMetrics
from grpo.optimizer import learning_rate
from grpo.plumbing.command_line import exit_on_mistake
from grpo.plumbing.config import load_config
from grpo.plumbing.training_run import Run
from grpo.reference import update_reference


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


def train(run):
    """Take all steps of `run`, which holds the models, the data, the optimizer and the files."""
    config = run.config
    for step in range(run.start, config.max_iters):
        run.optimizer.set_learning_rate(learning_rate(step, config))
        batch = run.draw_batch(step)  # a function of (seed, step) alone
        rollout, metrics = grpo_step(
            run.policy, run.reference, run.rewards, run.optimizer, batch, config
        )
        # By default the reference stays as it is. With reference_mode=ema or periodic it follows
        # the policy.
        update_reference(run.reference_network, run.policy_network, step + 1, config)
        run.log_and_save(step, rollout, metrics)  # ends the run after Ctrl-C or a NaN


def main(arguments):
    with exit_on_mistake("train_grpo.py"):  # prints a user's mistake in one line, exits with 2
        with Run(load_config(arguments)) as run:  # Ctrl-C ends the run after the current step
            train(run)
            run.finish()  # prints how well the policy fills held-out inputs, before and after


if __name__ == "__main__":
    main(sys.argv[1:])
