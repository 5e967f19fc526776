"""Single-step fill-in GRPO: teach a model that fills all blanks at once to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

`grpo_step` is the algorithm (DeepSeekMath, 2402.03300, Algorithm 1); `train` repeats it.

Letters: B inputs, T characters of each, G completions of each input, V characters of vocabulary.

Where this departs from the paper, and why: grpo/README.md.
"""

import sys

import torch

from grpo.advantage import group_advantages
from grpo.loss import grpo_loss
from grpo.metrics import StepMetrics
from grpo.optimizer import learning_rate
from grpo.plumbing.config import exit_on_mistake, load_config
from grpo.plumbing.run import Run
from grpo.policy import logprobs, sample
from grpo.reference import update_reference
from grpo.rollout import Rollout, in_batches


def grpo_step(policy, reference, rewards, optimizer, inputs, config):
    """One step on this process's inputs -> (Rollout, {metric: scalar}).

    policy and reference map tokens (B,T) to logits (B,T,V), of a mixture (B,T,K,V). A parallel fill
    depends on the input alone, so one forward pass serves all its G completions: no input is ever
    repeated G times.
    """
    # 1. Sample: fill every input G times, each in one parallel step.
    with torch.no_grad():
        logits = in_batches(policy, inputs.masked, config.batch_size)  # (B,T,V)
        ref_logits = in_batches(reference, inputs.masked, config.batch_size)  # (B,T,V)
        fills = sample(logits, inputs, config)  # completions (B,G,T), by the inputs' uniforms
        # log q, log q_ref of the draws (B,G,T), q as sampled; KL, H (B,T) of the whole vocabulary
        old = logprobs(logits, ref_logits, fills, config)

    # 2. Judge: log p/q of each run of blanks, a word: how much more would the text write it than
    #    the base model? (credit=input: of each completion, the mean over its blanks.)
    #    credits (B,G,T), or (B,G,1): the weighted sum of the reward's P parts, for each blank;
    #    parts (B,G,P): each part's view of the whole completion, for the log alone.
    credits, parts = rewards(fills, inputs, config.credit)

    # 3. Compare: how much better than the others of its group?
    advantages = group_advantages(credits, inputs.mask, config)  # as credits; blanks alone count
    metrics = StepMetrics(rewards, parts)  # of rewards: names and weights of its parts

    # 4. Update: make the characters of better completions likelier, stay close to the reference.
    rollout = Rollout(inputs, fills, ref_logits, old, credits, advantages)
    for batch in rollout.updates(config):  # num_iterations passes, each whole or in mini-batches
        for micro in batch.split(config.batch_size):  # pieces that fit in memory: losses add up
            logits = policy(micro.inputs.masked)  # (B,T,V), with their graph
            now = logprobs(logits, micro.ref_logits, micro.fills, config)
            loss, terms = grpo_loss(now, micro, batch, config)  # batch: counts for the mean
            optimizer.backward(loss)  # loss.backward(); gradients and losses add up
            metrics.add(terms, now, micro, batch)
        grad_norm = optimizer.step()  # sum over processes, clip, AdamW; not finite: no update
        metrics.updated(grad_norm)
    return rollout, metrics.result()


def train(run):
    """The loop. `run` holds what the settings became: models, data, optimizer, files."""
    config = run.config  # of a resumed run: its checkpoint's, and what was given again
    for step in range(run.start, config.max_iters):
        run.optimizer.set_learning_rate(learning_rate(step, config))
        inputs = run.inputs(step)  # from (seed, step) alone
        rollout, metrics = grpo_step(
            run.policy, run.reference, run.rewards, run.optimizer, inputs, config
        )
        # The modules behind `reference` and `policy`; with reference_mode=static nothing happens.
        update_reference(run.reference_model, run.generator, step + 1, config)
        run.after(step, rollout, metrics)  # log, save, show; raises after Ctrl-C, or if not finite


def main(arguments):
    with exit_on_mistake("train_grpo.py"):
        config = load_config(arguments)
        run = Run(config)  # mistakes in settings and files end here, before the first step
    with run:  # shows a few fills; Ctrl-C finishes the step; an early end says how to go on
        train(run)
        run.finish()  # the table: is it really better?


if __name__ == "__main__":
    main(sys.argv[1:])
