"""Check what a reward of the user's own gets, and what the setting `reward` refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import command_line, figures

import train_grpo
from data.user_mistake import Mistake
from data.vocabulary import decode
from grpo.batch import make_batch
from grpo.run.user_file import load_function, user_reward

MINE = """
import os, torch

torch.set_grad_enabled(False)
os.chdir("/")

def mine(completions, batch):
    os.chdir("/")
    torch.set_grad_enabled(False)
    return completions.float().mean(dim=-1)
"""
COMPLETIONS = torch.arange(24).view(2, 3, 4)  # (B,G,T)
MASK = torch.tensor([[True, True, False, True], [False, True, False, True]])  # (B,T)
BATCH = make_batch(COMPLETIONS[:, 0], MASK, MASK.long(), 3, (5, 17))  # of seed 5, step 17


def test_an_own_reward_gets_the_completions_and_their_batch():
    def curriculum(completions, batch):
        assert torch.equal(batch.words, BATCH.words)
        return completions.sum(dim=-1) * batch.seed[-1]

    have = user_reward("curriculum", curriculum, COMPLETIONS, BATCH)
    assert torch.equal(have, 17.0 * COMPLETIONS.sum(dim=-1))


def test_an_error_is_reported_and_a_nan_with_the_completion_that_got_it():
    bad = decode(COMPLETIONS[1, 2])[0]

    def fails(completions, batch):
        raise ValueError("no digits")

    def forgets(completions, batch):
        completions + 1

    def nan(completions, batch):
        return completions / (completions != COMPLETIONS[1, 2, 0]) * 0

    for function, what in (
        (fails, "ValueError: no digits"),
        (forgets, "returned a NoneType that isn't an array of numbers; return"),
        (nan, f"NaN.*{re.escape(repr(bad))}"),
    ):
        with pytest.raises(Mistake, match=what):
            user_reward("mine", function, COMPLETIONS, BATCH)


def test_user_code_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    """It may change folder, and switch gradients off."""
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    mine = load_function("mine.py", "mine")
    values = user_reward("mine", mine, COMPLETIONS, BATCH)
    assert torch.equal(values, COMPLETIONS.float().mean(dim=-1))
    assert Path.cwd() == tmp_path and torch.is_grad_enabled()


RULE = """
import sys
import data.rules

def balanced(text):
    depth = [text[:i].count("a") - text[:i].count("b") for i in range(len(text) + 1)]
    return min(depth) == 0 == depth[-1]

class Balanced:
    name = title = "balanced"
    whole = True

    @classmethod
    def made_for(cls, train, cut):
        return cls() if train.kind == "lines" and all(map(balanced, train.lines)) else None

    def spans(self, text):
        return [(0, len(text))]

    def is_good(self, text, start, end):
        return balanced(text)

data.rules.RULES.append(Balanced)
import train_grpo
table = train_grpo.main(sys.argv[1:])
assert table["the truth"]["balanced"] == 1 and 0 < table["after, sampled"]["balanced"] < 1
"""


def test_a_rule_is_a_class_and_a_line(world, flags, tmp_path):
    """Balanced brackets, as a and b, from the data to the table."""
    lines = ["ababab", "aabbab", "abaabb", "aababb", "aaabbb"]
    for part, some in (("train", lines[:4]), ("val", lines[3:])):
        (tmp_path / f"{part}.txt").write_text("\n".join(some), encoding="utf-8")
    changes = {"dataset": tmp_path, "block_size": 6, "masking": "random", "reward": "balanced"}
    changes |= {"generator_checkpoint": world / "digits.pt", "judge_checkpoint": ""}
    command = [sys.executable, "-c", RULE, *command_line(flags, **changes, eval_inputs=64)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not ended.returncode, ended.stderr
    assert "step 0: balanced" in ended.stdout and "different" in ended.stdout
    assert figures(flags["out_dir"])[0]["reward_balanced"] >= 0


def test_a_function_is_a_reward(flags, tmp_path):
    """From Python, without a file. The settings record its name, and its source by content."""

    def even(completions, batch):
        return (completions % 2 == 0).float().mean(dim=-1)

    train_grpo.main(command_line(flags), quiet=True, reward=even)
    out = Path(flags["out_dir"])
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["reward"] == "even" and config["made_with"]["reward file"]
    assert figures(out)[0]["reward_even"] > 0
    half = command_line(flags, reward="judge,even:0.5", out_dir=tmp_path / "b")
    train_grpo.main(half, quiet=True, reward=even)
    assert {"reward_even", "reward_judge"} <= figures(tmp_path / "b")[0].keys()
    with pytest.raises(Mistake, match="reward=even: .* pass a function to main"):
        train_grpo.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=5"])
    assert train_grpo.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=5"], True, even)
