"""Check what a reward and a rule of the user's own get, and what they may do."""

import random
import sys
from itertools import accumulate, product

import pytest
import torch
from conftest import command_line, figures, write_lines, write_text

import train_grpo
from data import dataset
from data.rules import Rule, ask
from data.user_mistake import Mistake
from data.vocabulary import decode
from grpo.batch import make_batch
from grpo.run.load import load_function, user_reward

COMPLETIONS = torch.arange(24).view(2, 3, 4)  # (B,G,T)
MASK = torch.tensor([[True, True, False, True], [False, True, False, True]])  # (B,T)
BATCH = make_batch(COMPLETIONS[:, 0], MASK, 3, (5, 17))


def test_it_gets_copies_and_may_not_return_nan():
    def writes(completions, batch):
        completions.zero_(), batch.noise.zero_()
        return batch.noise

    def nan(completions, batch):
        return 0 / (completions != COMPLETIONS[1, 2, 0]).all(dim=-1)

    assert not user_reward("my.py", writes, COMPLETIONS, BATCH).any()
    assert COMPLETIONS.any() and BATCH.noise.any()
    with pytest.raises(Mistake, match="my.py .* NaN; return finite numbers of shape"):
        user_reward("my.py", nan, COMPLETIONS, BATCH)


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


def test_a_file_may_be_any_program_and_have_the_name_of_a_module(tmp_path):
    """Dataclasses and pickle look for the file's names in sys.modules."""
    write_text(tmp_path / "random.py", PROGRAM)
    mine = load_function(tmp_path / "random.py", "mine")
    want = [[text.count("a") for text in decode(row)] for row in COMPLETIONS]
    assert user_reward("my.py", mine, COMPLETIONS, BATCH).tolist() == want
    assert sys.modules["random"] is random


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


def test_a_rule_that_raises_is_a_mistake():
    rule = Balanced()
    rule.is_good = lambda completion, masked: completion[9]
    with pytest.raises(Mistake, match="rule balanced fails for 'ab' .IndexError"):
        ask(rule, "ab", "a_")
