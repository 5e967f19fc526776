"""Check what the toy prints and shows, and the puzzles of grpo/puzzles.md."""

import re
import shlex
from pathlib import Path

import pytest

from grpo.tools import toy

COMMAND = "$ python -m grpo.tools.toy"
PENALTY = "--repetition_penalty=2"
PUZZLES = Path("grpo/puzzles.md").read_text(encoding="utf-8")


def lines(capsys, arguments):
    toy.main(shlex.split(arguments))
    return capsys.readouterr().out.splitlines()


def test_the_puzzles_show_what_the_toy_prints(capsys):
    """Each command, run as it stands there, prints the lines below it."""
    printed = {}
    for block in re.findall(r"^```\w*\n(.*?)^```", PUZZLES, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith(COMMAND):
                arguments = line.removeprefix(COMMAND)
                if arguments not in printed:
                    printed[arguments] = lines(capsys, arguments)
            elif printed:
                assert line in printed[arguments], arguments
    assert len(printed) > 15


def test_the_first_step_is_the_same_with_every_seed_and_later_ones_are_not():
    one, other = (toy.train([f"--seed={seed}", "--max_iters=2"]) for seed in (1, 2))
    assert one[:2] == other[:2] and one[2] != other[2]


def test_a_penalty_on_what_is_visible_changes_nothing_in_the_toy():
    """The letters h and l, which are visible, could not be drawn before either."""
    plain, penalised = (toy.train(["--max_iters=1", *flags]) for flags in ([], [PENALTY]))
    assert penalised[1] == pytest.approx(plain[1], abs=1e-6)
