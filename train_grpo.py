"""Single-step fill-in GRPO: teach a model that fills all blanks at once to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

`grpo_step` is the algorithm (DeepSeekMath, 2402.03300, Algorithm 1), and `train` repeats it.
grpo/README.md says where this departs from the paper, and why.

Letters: B masked inputs, T characters of each, G completions of each input.
"""

import sys

import torch

from grpo.advantage import group_advantages, where_uncertain
from grpo.batch import Rollout, micro_batches, minibatches
from grpo.distributed import total_over_processes
from grpo.loss import grpo_loss, loss_weights
from grpo.metrics import StepMetrics
from grpo.optimizer import learning_rate
from grpo.plumbing.config import exit_on_mistake, load_config
from grpo.plumbing.run import Run
from grpo.reference import update_reference


def grpo_step(policy, reference, rewards, optimizer, batch, config):
    """Take one step of GRPO on B masked inputs. Returns what happened, and the step's metrics.

    policy(batch)    a distribution over the fills of the inputs: `Product`, whose blanks are
                     independent (grpo/product.py), or `Latent`, which draws a z for each hidden
                     word first (grpo/latent.py); reference(batch) is the same, frozen
    fills            `Fills`: completions (B,G,T), and which characters could have been drawn
    old, now         `Scores`: logp and ref_logp of the drawn letters (B,G,T), and of each blank the
                     exact KL to the reference and the entropy (B,T)
    batch.mask       (B,T) bool, True at a blank
    batch.words      (B,T) int, which hidden word of its input a blank belongs to, 0: no blank
    batch.uniforms   (B,G,T,2), the random numbers that decide each draw
    """
    # 1. Sample. One forward pass per input serves all of its G completions, because all blanks are
    #    filled at once, so no fill changes the input of the network.
    with torch.no_grad():
        q_old = policy(batch)
        q_ref = reference(batch)
        fills = q_old.sample(batch.uniforms)
        old = q_old.score(fills, q_ref)  # q_ref is for the KL, and for ref_logp

    # 2. Judge. For every hidden word the judge, a frozen classifier, estimates log(p/q_ref): how
    #    much likelier its spelling is in real text than under the base model, the generator as it
    #    was. That number is the reward of each of the word's letters.
    reward, for_the_log = rewards(fills, batch, config.credit)  # (B,G,T), {name: (B,G)}

    # 3. Compare each word with the same word in the other fills (credit=input: all of its input).
    advantages = group_advantages(reward, batch.mask, config)  # (B,G,T)
    advantages = where_uncertain(advantages, old.entropy, batch.mask, config.top_entropy_quantile)

    # 4. Update. Make the letters of better words likelier, and stay close to the reference.
    metrics = StepMetrics(for_the_log, advantages, batch.mask)
    for epoch in range(config.num_iterations):
        for rows in minibatches(batch, epoch, config):  # an update takes all inputs, or some
            blanks = total_over_processes(batch.mask[rows].sum()).clamp(min=1)
            weights = loss_weights(batch.mask[rows], blanks, config)  # (B,T) what a blank counts
            loss_of_update = 0.0
            for micro, weight in micro_batches(rows, weights, config.batch_size):
                now = policy(batch[micro]).score(fills[micro], q_ref[micro])
                loss, terms = grpo_loss(
                    now, old[micro], advantages[micro], batch.words[micro], weight, config
                )
                loss.backward()  # the gradients of micro-batches add up, as their losses do
                loss_of_update += loss.detach()
                metrics.add(now, old[micro], terms, blanks)
            # Sums over processes, clips, and takes AdamW's step if loss and gradient are finite.
            grad_norm = optimizer.step(loss_of_update)
            metrics.updated(grad_norm)
    return Rollout(batch, fills, old, reward, advantages), metrics.result()


def train(run):
    """Repeat the step. `run` holds what it needs: models, data, optimizer and files."""
    config = run.config
    for step in range(run.start, config.max_iters):
        run.optimizer.set_learning_rate(learning_rate(step, config))
        batch = run.draw_batch(step)  # a function of (seed, step) alone
        rollout, metrics = grpo_step(
            run.policy, run.reference, run.rewards, run.optimizer, batch, config
        )
        update_reference(run.reference_network, run.policy_network, step + 1, config)
        run.log_and_save(step, rollout, metrics)  # this also ends the run after Ctrl-C


def main(arguments):
    with exit_on_mistake("train_grpo.py"):  # a user's mistake is one line, and exit code 2
        config = load_config(arguments)
        run = Run(config)
        with run:  # Ctrl-C lets the step finish, and one line says how to go on
            train(run)
            run.finish()  # the table: is it really better?


if __name__ == "__main__":
    main(sys.argv[1:])
