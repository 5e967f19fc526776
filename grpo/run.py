"""A run: what the settings become (data, models, optimizer, files), and what follows each step."""

import json
import math
from functools import partial
from pathlib import Path

import torch

from grpo.advantage import INDISTINCT
from grpo.compare import curves
from grpo.evaluate import Evaluation, word_figures
from grpo.kernel import choose
from grpo.optimizer import Optimizer
from grpo.plumbing.checkpoint import LATEST, load_model, restore_training, save_training
from grpo.plumbing.config import FREE_ON_RESUME, Config
from grpo.plumbing.distributed import gather, is_first, join
from grpo.plumbing.log import Clock, Log, read_metrics
from grpo.plumbing.setup import (
    check_inputs,
    digests,
    forward,
    load_data,
    load_models,
    pick_compile,
    pick_device,
    pick_dtype,
    resume,
    to_device,
)
from grpo.plumbing.stop import Ending, fetch
from grpo.reference import make_reference
from grpo.reward import parse_reward
from grpo.rollout import as_policy
from grpo.table import usual


def is_default_experiment(config):
    """Does it differ from the defaults in nothing that its figures depend on, but the seed?"""
    free = FREE_ON_RESUME - {"max_iters", "eval_inputs"} | {"seed", "dtype", "log_interval"}
    return config == Config(**{name: getattr(config, name) for name in free})


class Run:
    """Models, data, optimizer and files of a run, and what follows each of its steps.

    Every mistake of the user's is found while this is made, before the run writes anything.
    """

    def __init__(self, config):
        saved = None
        if config.init_from == "resume":
            config, saved = resume(config)
        parts = parse_reward(config.reward)  # noticed before a dataset is made
        setting = "reference_device" if config.reference_device else "device"
        reference_device = pick_device(config.reference_device or config.device, setting)
        device = pick_device(config.device)  # last: it becomes CUDA's current device
        config.dtype = pick_dtype(config.dtype, device)
        join(device)
        self.data, held_out = load_data(config.dataset, config.block_size, config.prompts_file)
        vocabulary = self.data.vocabulary
        self.generator, untouched, judge, state = load_models(config, vocabulary, saved)
        self.inputs = digests(config, [name for name in parts if name.endswith(".pt")])
        config.kernel = choose(config.kernel, device, len(vocabulary), config.group_size)
        config.compile = pick_compile(config, device, state)
        self.config = config
        state = state or {}
        self.start = state.get("iteration", 0)
        check_inputs(config, self.inputs, state.get("inputs", {}))
        judge = forward(judge.to(device), device, config)
        self.evaluation = Evaluation(config, judge, self.data, held_out, device)
        self.rewards = self.evaluation.rewards

        # The models, and what they are called as: autocast, compiled, wherever they live.
        self.reference_model = make_reference(
            untouched, config.reference_mode, state.get("reference")
        )
        self.policy = as_policy(self.generator.to(device), device, config)
        self.reference = as_policy(
            self.reference_model.to(reference_device), reference_device, config
        )
        before = untouched  # what the run began with
        if config.reference_checkpoint:
            before = load_model(config.generator_checkpoint, "generator", vocabulary)
        self.before = as_policy(before.to(reference_device), reference_device, config)

        self.optimizer = Optimizer(self.generator, config)
        # Inputs and draws have seeds of their own; this is for whatever else may draw.
        torch.manual_seed(config.seed)
        if state:
            restore_training(state, self.optimizer.adamw, Path(config.out_dir) / LATEST)
        self.clock = Clock(device)
        self.to_device = partial(to_device, device=device)
        self.ending = Ending(config, self.start)
        self.waiting = []  # (step, metrics) that no one has looked at yet
        self.log = Log(config, self.start)  # from here on files are written

    def look(self, step):
        """A few held-out inputs, as text, before and now."""
        self.log.say(self.evaluation.peek(self.policy, self.before, step))

    def after(self, step, inputs, rollout, metrics):
        """What follows a step: its line in metrics.jsonl, a checkpoint, a look, the end."""
        config = self.config
        done = step + 1
        last = done == config.max_iters
        stop = self.ending.requested()
        log_now = last or done % config.log_interval == 0
        save_now = last or stop or done % config.save_interval == 0
        self.waiting.append((step, metrics))
        if log_now or save_now:
            numbers = fetch(self.waiting)  # waits for the device; raises if one is not finite
            self.check_policy(step, numbers)
        if log_now:
            numbers["valid_words"] = self.share_of_valid_words(inputs, rollout)
            numbers["lr"] = self.optimizer.adamw.param_groups[0]["lr"]
            self.log.metrics(step, numbers | self.clock.read(), rollout)
        self.log.bar.update()
        if save_now:
            save_training(
                config,
                self.generator,
                self.reference_model,
                self.optimizer.adamw,
                done,
                self.data.vocabulary,
                self.inputs,
            )
            self.ending.saved = done
        if stop:
            self.ending.stop(stop, f" after step {step}")
        if last or done % config.eval_interval == 0:
            self.check_rewards(done)
            self.look(done)

    def check_policy(self, step, numbers):
        """Says so where the reference holds the fills for less likely than blind draws.

        That is, -Σ p log p_ref = KL + entropy a tenth above the log of as many characters as can
        be drawn, in nats a blank: no such policy is sane. With kl_of=marginal the sum is less than
        that, at most by log K: the line comes later, and never falsely.
        """
        surprise = numbers["mean_kl"] + numbers["entropy"]
        blind = math.log(len(self.data.vocabulary) - 1)
        if surprise > 1.1 * blind:  # under an untrained reference it is that log, and rounding
            self.log.warn(
                "policy",
                f"step {step}: the reference finds these fills less likely than characters drawn"
                f" blindly ({surprise:.2f} nats a blank, blindly {blind:.2f}): the policy is"
                " ruined; begin anew with a lower learning_rate, or with a higher kl_beta",
            )

    def check_rewards(self, steps):
        """Says so where a part of the reward has never told two completions of a group apart."""
        spans = gather(self.rewards.spans[None]).amax(dim=0)  # (P,) its parts
        for name, span in zip(self.rewards.names, spans.tolist()):
            if span <= INDISTINCT:
                self.log.warn(
                    name,
                    f"reward {name} was the same for all completions of every group in {steps}"
                    " steps: it teaches nothing",
                )

    def share_of_valid_words(self, inputs, rollout):
        """Of the step's own inputs, on all processes."""
        fills = gather(rollout.completions.reshape(inputs.uniforms.shape))  # (B,G,T)
        figures = word_figures(
            gather(inputs.tokens),
            gather(inputs.mask),
            fills,
            self.data.vocabulary,
            self.evaluation.words,
            cut=not self.config.prompts_file,
        )
        return figures["valid_words"]

    def conclude(self):
        """What a reader asks next: how did it go, is that normal, where is it, what now?"""
        out = Path(self.config.out_dir)
        if not is_first():
            return
        self.log.say(curves({"": read_metrics(out / "metrics.jsonl")}))
        if is_default_experiment(self.config):
            result = json.loads((out / "evaluation.json").read_text())
            self.log.say(usual(result))
        self.log.say(
            f"in {out}: evaluation.json, completions.jsonl, metrics.jsonl, checkpoint.pt; next:"
            f"\n  python -m grpo.evaluate {out}"
            f'\n  python -m grpo.fill "this function returns a ____ of strings"'
            f" --checkpoint={out / LATEST}"
        )

    def finish(self):
        """The table, and the completions it was made from."""
        self.ending.steps_done()
        table = self.evaluation.finish(self.policy, self.before)
        self.ending.complete = True
        self.log.bar.close()
        self.log.say(table)
        self.conclude()
        self.log.evaluation()
