"""Check what a reward of the user's own gets, and what the setting `reward` refuses."""

import json
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import command_line, figures

import train_grpo
from data.user_mistake import Mistake
from data.vocabulary import decode
from grpo.batch import make_batch
from grpo.run.config import Config
from grpo.run.origin import made_with
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
BATCH = make_batch(COMPLETIONS[:, 0], MASK, 3, (5, 17))  # of seed 5, step 17


def test_an_own_reward_gets_the_completions_and_their_batch():
    def curriculum(completions, batch):
        assert torch.equal(batch.masked, BATCH.masked)
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
        return 0 / (completions != COMPLETIONS[1, 2, 0]).all(dim=-1)

    for function, what in (
        (fails, "ValueError: no digits"),
        (forgets, "returned a NoneType that isn't an array of numbers; return"),
        (nan, f"NaN.*{re.escape(repr(bad))}"),
    ):
        with pytest.raises(Mistake, match=what):
            user_reward("mine", function, COMPLETIONS, BATCH)


def test_the_completion_that_a_reward_fails_for_is_named():
    bad = decode(COMPLETIONS[1, 2])[0]

    def fails(completions, batch):
        assert len(completions) == len(batch.masked)
        return [[1 / (text != bad) for text in decode(row)] for row in completions]

    with pytest.raises(Mistake, match=f"mine failed for the completion {bad!r}: ZeroDivisionErr"):
        user_reward("mine", fails, COMPLETIONS, BATCH)


PROGRAM = """
from __future__ import annotations
from dataclasses import dataclass
from multiprocessing import Pool
from random import choice

from data.vocabulary import decode

@dataclass
class Letter:
    letter: str = choice("a")

def count(text):
    return text.count(Letter().letter)

def mine(completions, batch):
    with Pool(1) as pool:
        return [pool.map(count, decode(row)) for row in completions]
"""


@pytest.mark.parametrize("name", ["program", "random", "my program"])
def test_a_file_may_be_any_program_and_have_the_name_of_a_module(tmp_path, name):
    """Dataclasses and pickle look for the file's names in sys.modules."""
    (tmp_path / f"{name}.py").write_text(PROGRAM, encoding="utf-8")
    mine = load_function(tmp_path / f"{name}.py", "mine")
    want = [[text.count("a") for text in decode(row)] for row in COMPLETIONS]
    assert user_reward("mine", mine, COMPLETIONS, BATCH).tolist() == want
    assert sys.modules["random"] is random


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
from itertools import accumulate, product

import data.rules

class Balanced(data.rules.Rule):
    name = "balanced"

    def is_good(self, completion, masked):
        depth = list(accumulate({"a": 1, "b": -1}.get(c, -9) for c in completion))
        return min(depth) == depth[-1] == 0

    def answers(self, masked):
        texts = map("".join, product(*("ab" if c == "_" else c for c in masked)))
        return [text for text in texts if self.is_good(text, masked)]

data.rules.LINE_RULES.append(Balanced())
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
    assert config["reward"] == "even"
    assert "tests/program/test_own_reward.py" in config["made_with"]["files"]
    assert figures(out)[0]["reward_even"] > 0
    half = command_line(flags, reward="judge,even:0.5", out_dir=tmp_path / "b")
    train_grpo.main(half, quiet=True, reward=even)
    assert {"reward_even", "reward_judge"} <= figures(tmp_path / "b")[0].keys()
    with pytest.raises(Mistake, match="this run's reward, even, was passed from Python; pass it"):
        train_grpo.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=5"])
    assert train_grpo.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=5"], True, even)


def pay(amount, completions, batch):
    return torch.full(completions.shape[:2], amount)


class Pay:
    def __call__(self, completions, batch):
        return pay(7.0, completions, batch)


@pytest.mark.parametrize("reward", [lambda *given: pay(7.0, *given), partial(pay, 7.0), Pay()])
def test_a_function_without_a_name_is_called_own(flags, reward):
    for setting, judge_pays in (("judge", False), ("judge,own:0.5", True)):
        arguments = command_line(flags, reward=setting, max_iters=1)
        train_grpo.main(arguments, quiet=True, reward=reward)
        (step,) = figures(flags["out_dir"])
        assert step["reward_own"] == 7 and ("reward_judge" in step) == judge_pays


@pytest.mark.parametrize("name", ["judge", "valid", "correct"])
def test_a_function_may_not_have_the_name_of_a_judge_or_a_rule(world, flags, tmp_path, name):
    def own(completions, batch):
        return pay(7.0, completions, batch)

    own.__name__ = name
    for part, text in (("train", "41+47=88"), ("val", "10+20=30")):
        (tmp_path / f"{part}.txt").write_text(text, encoding="utf-8")
    changes = {"dataset": tmp_path, "block_size": 8, "masking": "columns"}
    changes |= {"generator_checkpoint": world / "digits.pt", "judge_checkpoint": ""}
    with pytest.raises(Mistake, match=f"the name {name} is taken; rename the function"):
        train_grpo.main(command_line(flags, **changes), quiet=True, reward=own)


def test_a_file_that_happens_to_have_the_name_of_a_reward_is_none_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = made_with(Config())
    (tmp_path / "judge").touch()
    assert made_with(Config()) == before
