"""Single-step fill-in GRPO: teach a model that fills all blanks at once to make them agree.

    python train_grpo.py config/grpo_config.py --group_size=16

One iteration, in the words of Algorithm 1 of DeepSeekMath (2402.03300):

    sample masked inputs                                                       data/dataset.py    Dataset.batch
    fill each of them G times, in one parallel step                            grpo/sampling.py   sample_completions
    score the completions with the frozen judge                                grpo/reward.py     Rewards
    advantages: how much better than its group was each one?                   grpo/advantage.py  advantages
    for each inner update (num_iterations):                                    grpo/step.py       grpo_step
        log-probabilities, exact KL and entropy, with their gradient           grpo/stats.py      stats
        loss = clipped policy gradient + kl_weight · KL − entropy_coef · H     grpo/loss.py       grpo_loss
        AdamW step
    the reference follows, or stays                                            grpo/reference.py  update_reference

Where this departs from the paper: the logits are computed once per input, not once per completion (a parallel fill depends on
nothing else); the KL is the sum over the vocabulary, not a sample's estimate; with kl_target its weight grows with it (loss.kl_weight);
with credit=run a blank is rewarded by the judge's view of its neighbourhood, not of the whole completion; the reference is replaced
only on request (reference_mode).
"""

import math
import sys

import torch

from data.masking import parse_masking
from grpo.evaluate import Evaluation, word_figures
from grpo.kernel import choose
from grpo.plumbing.checkpoint import restore_training, save_training
from grpo.plumbing.config import exit_on_mistake, help_text, load_config
from grpo.plumbing.distributed import gather, join, share, world
from grpo.plumbing.log import Clock, Log
from grpo.plumbing.setup import (
    estimate_minutes,
    forward,
    is_compiled,
    load_data,
    load_models,
    make_optimizer,
    pick_compile,
    pick_device,
    pick_dtype,
    to_device,
)
from grpo.plumbing.stop import Signals, Stopped, exit_when_stopped, fetch
from grpo.reference import make_reference, update_reference
from grpo.step import draw_uniforms, grpo_step


def learning_rate(iteration, config):
    """Linear warm-up, then a cosine from learning_rate to min_lr at lr_decay_iters (1608.03983, equation 5)."""
    if iteration < config.warmup_iters:
        return config.learning_rate * (iteration + 1) / (config.warmup_iters + 1)
    progress = min(
        1.0,
        (iteration - config.warmup_iters)
        / max(1, (config.lr_decay_iters or config.max_iters) - config.warmup_iters),
    )
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (
        config.learning_rate - config.min_lr
    )


def setup(arguments):
    """Settings, data and models. Every mistake of the user's is found here, before anything is written."""
    config = load_config(arguments)
    config.gradient_accumulation_steps *= world()[0]  # counts the micro-batches of all processes
    config.reference_device, device = (
        str(
            pick_device(
                config.reference_device or config.device,
                "reference_device" if config.reference_device else "device",
            )
        ),
        pick_device(config.device),
    )
    config.dtype = pick_dtype(config.dtype, device)
    join(device)
    train, val = load_data(config.dataset, config.block_size, config.prompts_file)
    generator, reference, judge, state = load_models(config, train.vocabulary)
    config.kernel = choose(config.kernel, device, len(train.vocabulary), config.group_size)
    config.compile, start = pick_compile(config, device, state), state["iteration"] if state else 0
    if start >= config.max_iters:
        raise ValueError(
            f"resume: {config.out_dir} is at step {start} already; give a larger max_iters, or for its table: python -m grpo.evaluate {config.out_dir}"
        )
    evaluation = Evaluation(config, forward(judge.to(device), device, config), train, val, device)
    return (
        config,
        device,
        train,
        evaluation,
        generator,
        reference,
        judge,
        state,
        start,
        Log(config, start),
    )


def train_loop(config, device, train, evaluation, generator, untouched, judge, state, start, log):
    reference = make_reference(untouched, config.reference_mode, state and state.get("reference"))
    generate, refer, before = (
        forward(model.to(at), at, config)
        for model, at in (
            (generator, device),
            (reference, torch.device(config.reference_device)),
            (untouched, torch.device(config.reference_device)),
        )
    )
    optimizer, scaler = (
        make_optimizer(generator, config),
        torch.amp.GradScaler(device.type, enabled=config.dtype == "float16"),
    )
    torch.manual_seed(
        config.seed
    )  # inputs and draws have seeds of their own; this is for whatever else may draw
    if state:
        restore_training(state, optimizer, scaler)
    masking, inputs, clock, steps = (
        parse_masking(config.masking),
        config.batch_size * config.gradient_accumulation_steps,
        Clock(device),
        [],
    )
    log.say(
        f"{config.max_iters - start} GRPO steps of {inputs} inputs x {config.group_size} completions on {device}"
        f"{', compiled' if is_compiled(device, config) else ''}, kernel: {config.kernel}; then the table on {config.eval_inputs} held-out inputs"
        + (
            f": about {estimate_minutes(generator, judge, config, config.max_iters - start):.1f} minutes"
            if device.type == "cpu"
            else ""
        )
    )
    log.say(evaluation.peek(generate, before, start))

    with Signals() as signals:
        for iteration in range(start, config.max_iters):
            clock.start()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(iteration, config)
            tokens, mask = train.batch(
                inputs,
                config.block_size,
                masking,
                config.mask_ratio,
                config.hidden_words,
                (config.seed, iteration, 0),
            )
            uniforms = draw_uniforms(
                inputs, config.group_size, config.block_size, (config.seed, iteration, 1)
            )
            tokens, mask, uniforms = (to_device(share(x), device) for x in (tokens, mask, uniforms))
            clock.mark("data")
            rollout, metrics = grpo_step(
                generate,
                refer,
                evaluation.rewards,
                optimizer,
                tokens,
                mask,
                train.mask_id,
                uniforms,
                config,
                clock,
                scaler,
                (config.seed, iteration),
            )
            steps.append((iteration, metrics))

            done, stop = iteration + 1, signals.requested()
            update_reference(
                reference,
                generator,
                done,
                config.reference_mode,
                config.ema_alpha,
                config.reference_update_freq,
            )
            log_now, save_now = (
                done % interval == 0 or done == config.max_iters
                for interval in (config.log_interval, config.save_interval)
            )
            if log_now or save_now or stop:
                metrics = fetch(steps)
            if log_now:
                metrics["valid_words"] = word_figures(
                    gather(tokens),
                    gather(mask),
                    gather(rollout.completions),
                    train.vocabulary,
                    evaluation.words,
                )["valid_words"]
                log.metrics(
                    iteration,
                    metrics | {"lr": learning_rate(iteration, config)} | clock.read(),
                    rollout,
                )
            log.bar.update()
            if save_now or stop:
                save_training(
                    config, generator, reference, optimizer, scaler, done, train.vocabulary
                )
            if stop:
                raise Stopped(f"stopped by {stop.name} after step {iteration}", 128 + stop)
            if done % config.eval_interval == 0 and done < config.max_iters:
                log.say(evaluation.peek(generate, before, done))
    log.say(evaluation.peek(generate, before, config.max_iters))
    table = evaluation.finish(generate, before)
    log.evaluation()
    return table


def main(arguments):
    if {"--help", "-h"} & set(arguments):
        print(help_text())
        return
    with exit_on_mistake("train_grpo.py"):
        run = setup(arguments)
    log = run[-1]
    with exit_when_stopped(run[0].out_dir), log:
        table = train_loop(*run)
    log.say(table)


if __name__ == "__main__":
    main(sys.argv[1:])
