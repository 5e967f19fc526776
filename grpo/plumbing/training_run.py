"""A `Run` makes all that the steps need, logs and saves the steps, and prints the final table."""

import math
import shlex
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from data.exceptions import Mistake
from grpo.batch import draw_batch
from grpo.cuda.kernel import choose
from grpo.distributed import join
from grpo.evaluation import evaluate
from grpo.metrics import text_metrics
from grpo.optimizer import Optimizer
from grpo.plumbing import replay_recorder
from grpo.plumbing.checkpoint import (
    LATEST,
    ROOT,
    load_model,
    read,
    restore_training,
    save_training,
)
from grpo.plumbing.command_line import print_cause
from grpo.plumbing.load import (
    load_data,
    load_models,
    load_rewards,
    make_judge,
    make_policy,
    pick_compile,
    pick_device,
    pick_dtype,
)
from grpo.plumbing.log import Clock, Log, Signals, curves, read_metrics, save_table
from grpo.reference import make_reference

# A NaN in one of these metrics spreads only to the metrics below it. So the first metric that is
# not finite tells what went wrong.
SUSPECTS = {
    "entropy": "the generator's logits",
    "log_prob": "the generator's logits after the update",
    "mean_kl": "the reference's logits",
    "mean_reward": "the rewards",
    "loss": "the loss",
    "grad_norm": "the gradient",
}


def as_numbers(metrics):
    """Turn {metric: scalar tensor} into {metric: number}, and wait for the device only once.

    Raises FloatingPointError if a metric in SUSPECTS is not finite. If that metric is `log_prob`,
    the last update has given the policy bad weights. If it is any other metric, `Optimizer.step`
    has skipped the bad update.
    """
    values = torch.stack(list(metrics.values())).tolist()
    numbers = dict(zip(metrics, values))
    for name, what in SUSPECTS.items():
        if not math.isfinite(numbers.get(name, 0)):
            line = f"not finite: {what} ({name}={numbers[name]}); try a lower learning_rate"
            raise FloatingPointError(line)
    return numbers


class Run:
    """This holds the models, data, optimizer and files of a run, and logs and saves its steps.

    Making a `Run` finds a user's mistakes before anything is written. To use it from Python:

        from train_grpo import Run, load_config, train

        with Run(load_config(["config/quick.py", "--out_dir=out-mine"])) as run:
            train(run)
            run.finish()  # prints the table
    """

    def __init__(self, config):
        saved = {}
        if config.init_from == "resume":
            saved = read(Path(config.out_dir) / LATEST)
        state = saved.get("training", {})
        device = pick_device(config.device)
        elsewhere = pick_device(config.reference_device)
        if config.reference_device == "auto":
            elsewhere = device
        config = replace(
            config,
            dtype=pick_dtype(config.dtype, device),
            compile=pick_compile(config.compile, device),
        )
        join(device)
        self.data, val = load_data(config.dataset, config.block_size, config.prompts_file)
        vocabulary = self.data.vocabulary
        self.device = device

        # Make the networks, and the policies and functions that call them.
        self.policy_network, base, judge = load_models(config, vocabulary, saved)
        fused = choose(config, device, len(vocabulary), self.policy_network.n_latent)
        self.config = config = replace(config, kernel=fused)
        self.reference_network = make_reference(base, config.reference_mode, state.get("reference"))
        before = base  # the generator as it was before the first step
        if config.reference_checkpoint:
            before = load_model(config.generator_checkpoint, "generator", vocabulary)
        self.clock = Clock(device)
        timed = self.clock.timed
        self.policy = timed("policy", make_policy(self.policy_network, device, config))
        reference = make_policy(self.reference_network, elsewhere, config)
        self.reference = timed("reference", reference)
        self.before = make_policy(before, elsewhere, config)
        self.judge = timed("judge", make_judge(judge, device, config))
        self.held_out = evaluate.hold_out(config, self.data, val, device)
        self.rewards = load_rewards(config, self.judge, vocabulary, self.held_out.lexicon, device)
        few = self.held_out.batch[:2]
        fills = few.tokens[:, None].repeat(1, 3, 1)  # (2,3,T)
        with torch.compiler.set_stance("force_eager"):  # try the reward, so a faulty one fails now
            evaluate.opinions(self.judge, self.rewards, fills, few)
        self.optimizer = Optimizer(self.policy_network, config)
        # This seed is only for a user's reward function, in case it draws random numbers.
        torch.manual_seed(config.seed)
        if state:
            restore_training(state, self.optimizer.adamw, config.out_dir)

        self.again = shlex.quote(config.out_dir)  # part of the commands that `__exit__` prints
        # We run a user's FILE.py only if the command line names it, so these commands name it.
        if ".py:" in config.reward:
            self.again += f" --reward={shlex.quote(config.reward)}"
        self.start = self.step = self.saved = state.get("iteration", 0)
        self.signals = Signals()
        self.log = Log(config, self.start)  # from here on we write files
        self.records = config.replay and self.log.first

    def __enter__(self):
        self.signals.__enter__()
        if self.records:
            replay_recorder.begin(self.before, self.held_out, self.config, self.start)
        self.look(self.start)
        self.began = time.monotonic()
        return self

    def look(self, step):
        """Print how the base model and the policy fill a few held-out texts."""
        shown = evaluate.peek(self.policy, self.before, self.held_out, step)
        self.log.say(shown)

    def draw_batch(self, step):
        """Start the clock of a step, and draw its masked inputs: -> `Batch`."""
        self.step = step
        self.clock.start()
        return self.clock.timed("data", draw_batch)(self.data, self.config, step, self.device)

    def log_and_save(self, step, rollout, metrics):
        """Write the step's line of metrics.jsonl. Every few steps, save the run, and show fills.

        After Ctrl-C, save and end the program. Raises FloatingPointError if a metric is not finite.
        """
        config = self.config
        done = step + 1
        last = done == config.max_iters
        stop = self.signals.requested()
        numbers = as_numbers(metrics)
        numbers |= text_metrics(
            rollout, self.rewards.decode, self.held_out.lexicon, cut=not config.prompts_file
        )
        numbers["lr"] = self.optimizer.adamw.param_groups[0]["lr"]
        self.log.metrics(step, numbers | self.clock.read())
        if self.records:
            replay_recorder.record(self.policy, self.held_out, self.config, step, rollout)
        if last or stop or done % config.save_interval == 0:
            self.check_weights()
            save_training(
                config,
                self.policy_network,
                self.reference_network,
                self.optimizer.adamw,
                done,
                self.data.vocabulary,
            )
            self.saved = done
        self.log.bar.update()
        if stop:
            sys.exit(128 + stop)
        if last or done % config.eval_interval == 0:
            self.look(done)

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def check_weights(self):
        """Raise FloatingPointError if the updated weights give logits that are not finite."""
        few = self.held_out.batch[:2]
        log_prob = self.policy(few).log_prob(few.tokens[:, None]).sum()
        as_numbers({"log_prob": log_prob})

    def finish(self):
        """Make and print the table. Then print the run's curves, and commands to try next."""
        out = self.config.out_dir
        self.log.bar.close()
        trained = time.monotonic()

        def after_row():
            stop = self.signals.requested()
            if stop:
                sys.exit(128 + stop)

        models = (self.policy, self.before, self.judge, self.rewards)
        result, completions = evaluate.table(*models, self.held_out, self.config, after_row)
        save_table(out, result, completions)
        say = self.log.say
        say(evaluate.format_table(result, evaluate.SHORT_ROWS, evaluate.SHORT_COLUMNS))
        say(curves({"": read_metrics(Path(out) / "metrics.jsonl")}))
        table = time.monotonic() - trained
        say(f"the steps took {trained - self.began:.0f} s, the table {table:.0f} s")
        say(f"in {out}: evaluation.json, completions.jsonl, metrics.jsonl, {LATEST}; next:")
        python = "python" if Path.cwd() == ROOT else f"PYTHONPATH={shlex.quote(str(ROOT))} python"
        quoted = shlex.quote(out)
        text = "this function returns a ____ of strings"
        say(f'  {python} -m grpo.tools.fill "{text}" --run={quoted}')
        if self.records:
            say(f"  {python} -m grpo.tools.replay {quoted}    # watch it learn")
        say(f"  {python} -m grpo.evaluation {quoted}    # all of the table")
        self.log.to_wandb(lambda run: run.summary.update(result))

    def __exit__(self, kind, error, _):
        """If the run ends early, print one last line: why, what is saved, and how to go on."""
        self.signals.__exit__()
        self.log.close(failed=kind is not None)
        if not error:
            return
        what = f"{error}" if kind in (Mistake, FloatingPointError) else f"{kind.__name__}: {error}"
        if self.signals.received:
            what = f"stopped by {signal.Signals(self.signals.received).name}"
        go_on = "nothing was saved yet"
        if self.saved:
            go_on = f"{self.saved} of {self.config.max_iters} steps are saved;"
            if self.saved < self.config.max_iters:
                go_on += f" to go on: --init_from=resume --out_dir={self.again},"
            go_on += f" for the table: python -m grpo.evaluation {self.again} --again"
        if isinstance(error, Mistake):
            print_cause(error)
        elif not isinstance(error, (FloatingPointError, OSError, SystemExit)):
            traceback.print_exception(error)
        if self.log.first:
            print(f"train_grpo.py: step {self.step}: {what}; {go_on}", file=sys.stderr)
        if not isinstance(error, SystemExit):
            sys.exit(2 if isinstance(error, Mistake) else 1)
