"""Single-step fill-in GRPO: teach a model that fills all blanks at once to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

`grpo_step` is the algorithm (DeepSeekMath, 2402.03300, Algorithm 1); `train` repeats it.

Letters: B inputs, T characters of each, G completions of each input, V characters of vocabulary.
A row is an input as one value of the generator's latent sees it. Without a latent R = B rows have
g = G completions each; with a coin of K sides (config/coin.py) R = B·K rows have g = G/K each.

Where this departs from the paper, and why: grpo/README.md.
"""

import grpo  # noqa: F401 (first: it answers Ctrl-C while the others are imported)

# isort: split

import sys

import torch

from grpo.advantage import group_advantages
from grpo.loss import count, grpo_loss, kl_weight, loss_weights, most_uncertain
from grpo.metrics import StepMetrics
from grpo.optimizer import learning_rate
from grpo.plumbing.config import exit_on_mistake, help_text, load_config
from grpo.plumbing.distributed import gather, share
from grpo.reference import update_reference
from grpo.rollout import Rollout, draw_inputs, in_batches, operations, probability_of_equal_fills
from grpo.run import Run
from grpo.sampling import options


def grpo_step(policy, reference, rewards, optimizer, inputs, config, clock):
    """One step on this process's inputs -> (Rollout, {metric: scalar tensor}).

    policy and reference map tokens (B,T) to logits (R,T,V). A parallel fill depends on the input
    alone, so one forward pass serves all its G completions: no input is ever repeated G times.
    """
    tau = config.temperature
    B, G, T = inputs.uniforms.shape

    # 1. Sample: fill every input G times, each in one parallel step.
    with torch.no_grad():
        logits = in_batches(policy, inputs.masked, config.batch_size)  # (R,T,V)
        n_latent = len(logits) // B
        sample_completions, stats = operations(config, n_latent)  # plain PyTorch, or CUDA
        masked, mask, uniforms = inputs.rows(n_latent)  # (R,T), (R,T), (R,g,T)
        # completions (R,g,T), kept (R,T,V): the characters that truncation left drawable
        completions, kept = sample_completions(logits, masked, mask, uniforms, **options(config))
        clock.mark("fill")
        ref_logits = in_batches(reference, inputs.masked, config.batch_size)  # (R,T,V)
        old = stats(logits, ref_logits, completions, kept, mask, tau)  # as they were drawn
        clock.mark("reference")

    # 2. Judge: how real does each completion look? With credit=run: each word of it?
    fills = completions.reshape(B, G, T)
    #    credits (B,G,1) or (B,G,T): the reward of each blank; parts (B,G,P): its P parts, whole.
    credits, parts = rewards(fills, inputs.masked, inputs.mask, config.credit)
    clock.mark("judge")

    # 3. Compare: how much better than the rest of its group was each one? What is compared over
    #    the step is compared over all of it: gather is the rows of all processes, share my own.
    advantages = share(group_advantages(gather(credits), gather(inputs.mask), config))  # as credits
    all_rows = gather(mask)  # (R,T), of all processes
    quantile = config.top_entropy_quantile  # 1: all blanks carry policy gradient
    learning = share(most_uncertain(gather(old.entropy), all_rows, quantile))  # (R,T) bool
    beta = kl_weight(gather(old.kl), all_rows, config)  # kl_beta, or the rein
    p_equal = probability_of_equal_fills(logits, kept, inputs, tau)  # (B,)
    metrics = StepMetrics(rewards, parts, advantages, p_equal, beta, config)

    # 4. Update: make the characters of better completions likelier, stay close to the reference.
    R, g, _ = completions.shape
    credits = credits.reshape(R, g, -1)  # (R,g,1) or (R,g,T)
    advantages = advantages.reshape(R, g, -1)  # as credits
    rollout = Rollout(
        inputs.masked, mask, completions, kept, ref_logits, old.logp, credits, advantages, learning
    )
    for batch in rollout.updates(config, inputs.orders):  # num_iterations passes, or mini-batches
        micro_batches = batch.split(config.batch_size)  # pieces that fit in memory: losses add up
        totals = count(batch.mask, len(micro_batches))  # of this whole update
        for micro in micro_batches:
            logits = policy(micro.masked)  # (r,T,V), with their graph
            now = stats(logits, micro.ref_logits, micro.completions, micro.kept, micro.mask, tau)
            weights = loss_weights(micro.mask, config.loss_type, g, totals)  # (r,T)
            loss, loss_parts = grpo_loss(now, micro, weights, beta, config)
            optimizer.backward(loss)
            metrics.add(loss_parts, now, micro, totals)
        metrics.updated(optimizer.step())  # sum over processes, clip, AdamW
    clock.mark("update")
    return rollout, metrics.result()


def train(run):
    """The loop. `run` holds what the settings became: models, data, optimizer, files."""
    config = run.config
    run.look(run.start)
    for step in range(run.start, config.max_iters):
        run.clock.start()
        run.optimizer.set_learning_rate(learning_rate(step, config))
        inputs = draw_inputs(run.data, config, step, run.to_device)
        run.clock.mark("data")
        rollout, metrics = grpo_step(
            run.policy, run.reference, run.rewards, run.optimizer, inputs, config, run.clock
        )
        update_reference(run.reference_model, run.generator, step + 1, config)
        run.after(step, inputs, rollout, metrics)  # log, save, look, stop if asked to
    run.finish()  # the table: is it really better?


def main(arguments):
    flags = [argument for argument in arguments if argument not in ("--help", "-h")]
    with exit_on_mistake("train_grpo.py"):
        config = load_config(flags)
        if flags != arguments:
            print(help_text(config))
            return
        run = Run(config)  # every mistake is found before the start
    with run.ending, run.log:
        train(run)


if __name__ == "__main__":
    main(sys.argv[1:])
