"""Check what the toy prints and shows, and the puzzles of grpo/README.md."""

import re
import shlex
from pathlib import Path

import pytest

from grpo.tools import toy

COMMAND = "$ python -m grpo.tools.toy"
README = Path("grpo/README.md").read_text()


def lines(capsys, arguments):
    toy.main(shlex.split(arguments))
    return capsys.readouterr().out.splitlines()


def test_the_puzzles_show_what_the_toy_prints(capsys):
    """Each command of the README, run as it stands there, prints the lines below it."""
    printed = {}
    for block in re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith(COMMAND):
                arguments = line.removeprefix(COMMAND)
                if arguments not in printed:
                    printed[arguments] = lines(capsys, arguments)
            elif printed:
                assert line in printed[arguments], arguments
    assert len(printed) > 20


def test_the_lessons_probabilities_have_not_changed(capsys):
    """By default the toy prints the probabilities that it printed when it had no settings."""
    rows = [line.split()[:5] for line in lines(capsys, "")[1:]]
    assert [rows[i] for i in (0, 1, 4, 7)] == [
        ["0", "0.250", "0.250", "0.250", "0.250"],
        ["1", "0.460", "0.093", "0.308", "0.139"],
        ["10", "0.899", "0.001", "0.083", "0.016"],
        ["100", "0.957", "0.000", "0.043", "0.000"],
    ]
    assert [row[0] for row in rows] == ["0", "1", "2", "5", "10", "20", "50", "100"]


def test_the_first_step_is_the_same_with_every_seed_and_later_ones_are_not():
    one, other = (toy.train(seed=seed, max_iters=2) for seed in (1, 2))
    assert one[:2] == other[:2] and one[2] != other[2]


def test_ratio_is_the_largest_of_a_letter_in_any_update():
    """A letter begins at probability 1/2. If one update makes it q, the next one has ratio 2q."""
    (_, first), (_, second) = (toy.train(num_iterations=n, max_iters=1) for n in (1, 2))
    q = [first["help"] + first[word] for word in ("helf", "halp")]  # P(e), P(p)
    assert first["ratio"] == 1
    assert second["ratio"] == pytest.approx(2 * max(q + [1 - x for x in q]))


def test_only_a_latent_can_make_the_blanks_depend_on_each_other():
    for n_latent in (1, 2):
        last = toy.train(n_latent=n_latent, max_iters=10)[-1]
        agree, clash = last["help"] * last["half"], last["helf"] * last["halp"]
        assert (agree == pytest.approx(clash)) == (n_latent == 1)
        assert sum(last[word] for word in toy.WORDS) == pytest.approx(1)


def test_a_setting_that_it_does_not_read_is_refused(capsys):
    for argument in ("--masking=word", "config/latent.py", "--n_latent=5"):
        with pytest.raises(SystemExit, match="2"):
            toy.main([argument])
        out, err = capsys.readouterr()
        assert not out and err.startswith("grpo.tools.toy: ") and err.count("\n") == 1
