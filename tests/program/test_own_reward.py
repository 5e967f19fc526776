"""Check what a reward and a rule of the user's own get, and what they may do."""

import pytest
import torch
from conftest import Letters, command_line, figures, write_lines

import train_grpo
from data import dataset
from data.rules import check
from data.user_mistake import Mistake
from grpo.batch import make_batch
from grpo.reward import user_reward

COMPLETIONS = torch.arange(24).view(2, 3, 4)  # (B,G,T)
MASK = torch.tensor([[True, True, False, True], [False, True, False, True]])  # (B,T)
BATCH = make_batch(COMPLETIONS[:, 0], MASK, 3, (5, 17))


def test_it_gets_a_copy():
    def writes(completions, batch):
        return completions.zero_()[..., 0]

    assert not user_reward("my.py", writes, COMPLETIONS, BATCH).any()
    assert COMPLETIONS.any()


def test_it_is_tried_on_whole_groups_before_anything_is_written(flags, tmp_path):
    """It may draw with PyTorch. If it returns one number an input, it fails."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def coin(c, batch): return torch.randint(2, c.shape[:2])\n"
        "def one(c, batch): return c.sum((1, 2))[:, None]\n"
    )
    with pytest.raises(Mistake, match="a number for each completion"):
        train_grpo.main(command_line(flags, reward=f"{file}:one"))
    assert not (tmp_path / "out").exists()
    flags |= {"reward": f"judge,{file}:coin", "max_iters": 2}
    for name in "ab":
        train_grpo.main(command_line(flags, out_dir=tmp_path / name))
    assert figures(tmp_path / "a") == figures(tmp_path / "b")


def test_a_rule_is_a_class_and_a_line(world, flags, tmp_path, monkeypatch, capsys):
    """From the data to the table."""
    monkeypatch.setattr(dataset, "LINE_RULES", [*dataset.LINE_RULES, Letters("abcdefghijklm")])
    lines = ["abcabc", "aabbcc", "ccbbaa"]
    changes = {"dataset": write_lines(tmp_path, lines[:2], lines[1:]), "block_size": 6}
    changes |= {"masking": "random", "reward": "letters", "eval_inputs": 64}
    changes |= {"generator_checkpoint": world / "digits.pt", "judge_checkpoint": ""}
    table = train_grpo.main(command_line(flags, **changes))
    assert table["the truth"]["letters"] == 1 and 0 < table["after, sampled"]["letters"] < 1
    assert "step 0: letters" in capsys.readouterr().out
    assert figures(flags["out_dir"])[0]["reward_letters"] > 0


def test_a_rule_that_raises_is_a_mistake():
    rule = Letters("a")
    rule.is_good = lambda completion, masked: completion[9]
    with pytest.raises(Mistake, match="rule letters fails for .* .IndexError"):
        check(rule, COMPLETIONS, BATCH.masked)
