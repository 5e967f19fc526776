"""One group as a step compares it, shown as text: what is pushed up, what down, how hard."""

import pytest
import torch

from grpo.group import as_text, first_group, main, plot
from grpo.plumbing.config import load_config
from tests.conftest import command_line

MASK = torch.tensor([False, True, True, False, True])
TEXTS = ["xabyc", "xdeyf"]


def test_signs_tell_direction_and_strength_and_one_strong_push_hides_nothing():
    push = torch.tensor([[0.0, 0.9, 0.2, 0.0, 0.0], [0.0, -0.2, -0.9, 0.0, 0.001]])
    shown = as_text(TEXTS, MASK, push).splitlines()
    assert shown == ["x[ab]y[c]", "  ^+", "x[de]y[f]", "  -v"]

    many = push.repeat(20, 1)
    many[0, 1] = 1000
    shown = as_text(TEXTS * 20, MASK, many).splitlines()
    assert shown[:4] == ["x[ab]y[c]", "  ^+", "x[de]y[f]", "  -v"]


def test_the_first_group_of_a_run(flags, capsys):
    texts, mask, push = first_group(load_config(command_line(flags)))
    assert len(texts) == len(push) == flags["group_size"]
    assert mask.any() and not push[:, ~mask].any()
    main(command_line(flags))
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 * flags["group_size"]
    assert shown[::2][0].replace("[", "").replace("]", "") == texts[0]


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot(tmp_path / "group.png", TEXTS, MASK, torch.randn(2, 5) * MASK)
    assert (tmp_path / "group.png").stat().st_size > 1000
