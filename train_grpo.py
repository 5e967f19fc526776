"""Single-step fill-in GRPO: teach a model that fills all blanks at once to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

`grpo_step` is the algorithm (DeepSeekMath, 2402.03300, Algorithm 1), and `train` repeats it.
grpo/README.md says where this departs from the paper, and why.

Letters: B masked inputs, T characters of each, G completions of each input.
"""

import sys

import torch

from grpo.advantage import group_advantages, where_uncertain
from grpo.batch import Rollout, minibatches, pieces
from grpo.distributed import total_over_processes
from grpo.loss import grpo_loss, loss_weights
from grpo.metrics import StepMetrics
from grpo.optimizer import learning_rate
from grpo.plumbing.config import exit_on_mistake, load_config
from grpo.plumbing.run import Run
from grpo.reference import update_reference


def grpo_step(policy, reference, rewards, optimizer, batch, config):
    """Take one step of GRPO on B masked inputs. Returns what happened, and the step's metrics.

    `policy` and `reference` map a batch to a distribution over its fills, which one can sample
    from and score with (grpo/product.py, grpo/latent.py).
    """
    # 1. Sample. One forward pass per input serves all of its G completions, because a parallel
    #    fill depends on the masked input alone.
    with torch.no_grad():
        q_old = policy(batch)
        q_ref = reference(batch)
        fills = q_old.sample(batch.uniforms)  # completions (B,G,T)
        old = q_old.score(fills, q_ref)  # log q (B,G,T) of what was drawn; KL and entropy (B,T)

    # 2. Judge. For every hidden word the judge estimates how much likelier its spelling is in real
    #    text than under the base model. That number is the reward of each of the word's letters.
    reward, parts = rewards(fills, batch, config.credit)  # (B,G,T); the parts are for the log

    # 3. Compare each fill with the other fills of the same word.
    advantages = group_advantages(reward, batch.mask, config)  # (B,G,T)
    advantages = where_uncertain(advantages, old.entropy, batch.mask, config.top_entropy_quantile)

    # 4. Update. Make the letters of better words likelier, and stay close to the reference.
    metrics = StepMetrics(parts, advantages, batch.mask)
    for epoch in range(config.num_iterations):
        for rows in minibatches(batch, epoch, config):  # all inputs, or shuffled parts of them
            blanks = total_over_processes(batch.mask[rows].sum()).clamp(min=1)
            weights = loss_weights(batch.mask[rows], blanks, config)  # (B,T) of the loss's mean
            total = 0.0
            for part, weight in pieces(rows, weights, config.batch_size):  # they fit into memory
                now = policy(batch[part]).score(fills[part], q_ref[part])
                loss, terms = grpo_loss(
                    now, old[part], advantages[part], batch.words[part], weight, config
                )
                loss.backward()  # the gradients of the pieces add up
                total += loss.detach()
                metrics.add(now, old[part], terms, blanks)
            grad_norm = optimizer.step(total)  # sum over processes, clip the gradient, AdamW
            metrics.updated(grad_norm)
    return Rollout(batch, fills, old, reward, advantages), metrics.result()


def train(run):
    """Repeat the step. `run` holds what the settings became: models, data, optimizer, files."""
    config = run.config
    for step in range(run.start, config.max_iters):
        run.optimizer.set_learning_rate(learning_rate(step, config))
        batch = run.draw_batch(step)  # a function of (seed, step) alone
        rollout, metrics = grpo_step(
            run.policy, run.reference, run.rewards, run.optimizer, batch, config
        )
        update_reference(run.reference_network, run.generator, step + 1, config)
        run.log_and_save(step, rollout, metrics)  # this also ends the run after Ctrl-C


def main(arguments):
    with exit_on_mistake("train_grpo.py"):
        config = load_config(arguments)
        run = Run(config)
        with run:  # Ctrl-C lets the step finish, and an early end says how to go on
            train(run)
            run.finish()  # the table: is it really better?


if __name__ == "__main__":
    main(sys.argv[1:])
