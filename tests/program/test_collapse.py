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
SHORT = "--max_iters=24 --batch_size=32 --group_size=8 --learning_rate=2e-3 --eval_inputs=200"


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


def failures(drawn, best, base):
    """Say what's wrong with a run on text, compared with the base model's best guesses."""
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


def table_of(name):
    return json.loads((PROJECT / f"grpo/experiments/results/{name}.json").read_bytes())


def test_what_ships_for_text_was_measured_and_found_good():
    """With other weights or settings, measure anew: grpo/experiments/README.md says how."""
    measured = table_of("text")
    table, row = measured["table"], measured["rows"][0]
    config = asdict(load_config(["config/text.py"]))
    for name, value in measured["settings"][row.split(",")[0]].items():
        assert (
            name in ("out_dir", "seed", "eval_inputs")
            or "_checkpoint" in name
            or (config[name] == value)
        ), name
    for file, digest in measured["weights"].items():
        assert hashlib.sha256((PROJECT / file).read_bytes()).hexdigest().startswith(digest)
    base = table[f"{config['chain_checkpoint']}, argmax"]
    assert not failures(table[f"{row}, sampled"], table[f"{row}, argmax"], base)


@pytest.mark.parametrize("run", ["out-text-weak", "out-text-early", "out-text-small-beta"])
def test_runs_that_went_wrong_would_have_been_noticed(run):
    table = table_of("text_earlier")["table"]
    rows = (table[f"{run} (runs: 1), {way}"] for way in ("sampled", "argmax"))
    assert failures(*rows, table["before, argmax"])
