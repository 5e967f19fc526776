"""Check what a reward of the user's own gets, and what the setting `reward` refuses."""

import random
import re
import sys
from itertools import accumulate, product
from pathlib import Path

import pytest
import torch
from conftest import command_line, figures, write_lines, write_text

import train_grpo
from data import dataset
from data.rules import Rule
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


def test_what_is_no_number_is_reported_and_a_nan_with_the_completion_that_got_it():
    bad = decode(COMPLETIONS[1, 2])[0]

    def forgets(completions, batch):
        completions + 1

    def nan(completions, batch):
        return 0 / (completions != COMPLETIONS[1, 2, 0]).all(dim=-1)

    for function, what in (
        (forgets, "returned a NoneType that isn't an array of numbers; return"),
        (nan, f"NaN.*{re.escape(repr(bad))}"),
    ):
        with pytest.raises(Mistake, match=what):
            user_reward("mine", function, COMPLETIONS, BATCH)


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
    write_text(tmp_path / f"{name}.py", PROGRAM)
    mine = load_function(tmp_path / f"{name}.py", "mine")
    want = [[text.count("a") for text in decode(row)] for row in COMPLETIONS]
    assert user_reward("mine", mine, COMPLETIONS, BATCH).tolist() == want
    assert sys.modules["random"] is random


def test_user_code_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    """It may change folder, and switch gradients off."""
    write_text(tmp_path / "mine.py", MINE)
    monkeypatch.chdir(tmp_path)
    mine = load_function("mine.py", "mine")
    values = user_reward("mine", mine, COMPLETIONS, BATCH)
    assert torch.equal(values, COMPLETIONS.float().mean(dim=-1))
    assert Path.cwd() == tmp_path and torch.is_grad_enabled()


class Balanced(Rule):
    """Brackets, as a and b."""

    name = "balanced"

    def is_good(self, completion, masked):
        depth = list(accumulate({"a": 1, "b": -1}.get(c, -9) for c in completion))
        return min(depth) == depth[-1] == 0

    def answers(self, masked):
        texts = map("".join, product(*("ab" if c == "_" else c for c in masked)))
        return [text for text in texts if self.is_good(text, masked)]


def test_a_rule_is_a_class_and_a_line(world, flags, tmp_path, monkeypatch, capsys):
    """From the data to the table."""
    monkeypatch.setattr(dataset, "LINE_RULES", [*dataset.LINE_RULES, Balanced()])
    lines = ["ababab", "aabbab", "abaabb", "aababb", "aaabbb"]
    changes = {"dataset": write_lines(tmp_path, lines[:4], lines[3:]), "block_size": 6}
    changes |= {"masking": "random", "reward": "balanced", "eval_inputs": 64}
    changes |= {"generator_checkpoint": world / "digits.pt", "judge_checkpoint": ""}
    table = train_grpo.main(command_line(flags, **changes))
    assert table["the truth"]["balanced"] == 1 and 0 < table["after, sampled"]["balanced"] < 1
    shown = capsys.readouterr().out
    assert "step 0: balanced" in shown and "different" in shown
    assert figures(flags["out_dir"])[0]["reward_balanced"] >= 0


@pytest.mark.parametrize("name", ["judge", "valid", "correct"])
def test_a_function_may_not_have_the_name_of_a_judge_or_a_rule(flags, tmp_path, name):
    write_text(tmp_path / "mine.py", f"def {name}(completions, batch): pass")
    with pytest.raises(Mistake, match=f"the name {name} is taken; rename the function"):
        train_grpo.main(command_line(flags, reward=f"{tmp_path}/mine.py:{name}"))


def test_a_file_that_happens_to_have_the_name_of_a_reward_is_none_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = made_with(Config())
    (tmp_path / "judge").touch()
    assert made_with(Config()) == before
