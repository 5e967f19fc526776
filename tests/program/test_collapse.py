"""Check that what ships isn't fooled: by a short run on sums, and by what was measured on text."""

import hashlib
import json
from dataclasses import asdict

import pytest
import torch

from data.files import PROJECT
from data.rules import check
from data.vocabulary import decode
from grpo.batch import draw_batch
from grpo.optimizer import Optimizer, learning_rate, make_adamw
from grpo.reward import judge_scores
from grpo.run.config import load_config
from grpo.run.load import load_data, load_models, load_rewards
from train_grpo import grpo_step

CPU = torch.device("cpu")
SHORT = "--max_iters=30 --batch_size=32 --group_size=8 --learning_rate=2e-3 --eval_inputs=200"


@pytest.mark.parametrize("config, fooled", [("grpo_config", False), ("fooled", True)])
def test_after_a_short_run_on_sums_only_the_weak_judge_is_fooled(config, fooled):
    settings = load_config([f"config/{config}.py", *SHORT.split()])
    models = load_models(settings, CPU)
    train, held_out = load_data(settings, models.base.network.vocab_size, CPU)
    rewards = load_rewards(settings, models, held_out.rule, CPU)
    optimizer = Optimizer(make_adamw(models.policy.network, settings), settings.grad_clip)
    for step in range(settings.max_iters):
        optimizer.set_learning_rate(learning_rate(step, settings))
        batch = draw_batch(train, settings, step, CPU)
        grpo_step(models.policy, models.reference, rewards, optimizer, batch, settings)
    with torch.no_grad():
        completions = (
            models.policy(held_out.batch.masked).sample(held_out.batch).completions[:, :4]
        )  # (200,4,11)
        accepted = judge_scores(models.judge, completions, held_out.batch) > 0
    wrong = ~check(held_out.rule, completions, held_out.batch.masked)
    assert (accepted[wrong].float().mean() > 0.1) == fooled
    first_numbers = {text[:3] for text in decode(completions.flatten(0, 1))}
    assert len(first_numbers) > 100


def failures(table, run):
    """Say what's wrong with a run on text, compared with the base model's best guesses."""
    drawn, best, base = table[f"{run}, sampled"], table[f"{run}, argmax"], table["before, argmax"]
    found = []
    if best["chain"][0] < base["chain"][0] + 0.2:
        found.append("its letters don't agree better")
    if best["exact"][0] < base["exact"][0] - 0.01:
        found.append("fewer words come back")
    if best["distance"][0] > base["distance"][0] + 0.02:
        found.append("it has favorite words")
    if max(row[judge][0] for row in (drawn, best) for judge in ("fooled", "other")) > 0.1:
        found.append("a judge is fooled")
    return found


def test_what_ships_for_text_was_measured_and_found_good():
    """With other weights or settings, measure anew: grpo/experiments/README.md says how."""
    content = (PROJECT / "grpo/experiments/results/text.json").read_bytes()
    measured = json.loads(content)
    config = load_config(["config/text.py"])
    ignored = {"out_dir", "seed", "eval_inputs", "generator_checkpoint", "judge_checkpoint"}
    then = {name: value for name, value in measured["settings"].items() if name not in ignored}
    assert then.items() <= asdict(config).items()
    for file, digest in zip(
        (config.generator_checkpoint, config.judge_checkpoint), measured["weights"]
    ):
        assert hashlib.sha256((PROJECT / file).read_bytes()).hexdigest().startswith(digest)
    assert not failures(measured["table"], "out-text-1-1 (runs: 9)")
    for fooled in ("out-text-weak", "out-text-early", "out-text-small-beta"):
        assert failures(measured["table"], f"{fooled} (runs: 1)")
