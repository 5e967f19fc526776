"""Check what the toy prints and shows, and the puzzles of grpo/puzzles.md."""

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from grpo.tools import toy

COMMAND = "$ python -m grpo.tools.toy"
PUZZLES = Path("grpo/puzzles.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def printed():
    """Run each command of the puzzles as it stands there: -> {arguments: the lines it prints}."""
    texts = {}
    for arguments in re.findall(rf"^{re.escape(COMMAND)}(.*)$", PUZZLES, re.MULTILINE):
        with redirect_stdout(io.StringIO()) as output:
            toy.main(shlex.split(arguments))
        texts[arguments] = output.getvalue().splitlines()
    return texts


def test_the_puzzles_show_what_the_toy_prints(printed):
    """Each command prints the lines below it."""
    assert len(printed) == 8
    for block in re.findall(r"^```\w*\n(.*?)^```", PUZZLES, re.MULTILINE | re.DOTALL):
        if COMMAND in block:
            for line in block.splitlines():
                if line.startswith(COMMAND):
                    arguments = line.removeprefix(COMMAND)
                else:
                    assert line in printed[arguments], arguments
