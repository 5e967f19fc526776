import re

import pytest
import torch

from data.dataset import encode
from grpo import fill
from grpo.plumbing.checkpoint import load_model, read


@pytest.fixture
def files(world):
    return [f"--before={world}/generator.pt", f"--judge={world}/judge.pt"]


@pytest.fixture
def models(world):
    vocabulary = read(world / "generator.pt")["vocabulary"]
    return (
        vocabulary,
        load_model(world / "generator.pt", "generator", vocabulary),
        load_model(world / "judge.pt", "judge", vocabulary),
    )


def test_probabilities_are_those_of_the_product_of_softmaxes(models):
    vocabulary, generator, judge = models
    masked = encode("a c_t s_t", vocabulary, 16, "text")[None]
    mask = masked == len(vocabulary) - 1
    fills, probability, scores, counts = fill.fill(generator, judge, masked, mask, 200, 0.7, 1)
    with torch.no_grad():
        q = (generator(masked)[0] / 0.7).softmax(dim=-1)  # (T,V)
    torch.testing.assert_close(probability, q[3, fills[:, 3]] * q[7, fills[:, 7]])
    assert (fills == masked)[:, ~mask[0]].all() and (fills[:, mask[0]] < len(vocabulary) - 1).all()
    assert counts.sum() == 200 and counts.max() > 1 and len(fills.unique(dim=0)) == len(fills) < 200
    assert (probability.diff() <= 0).all()
    torch.testing.assert_close(scores.mean(dim=-1), judge(fills).sigmoid().mean(dim=-1))


def test_the_surer_the_fewer(models):
    vocabulary, generator, judge = models
    masked = encode("a c_t", vocabulary, 16, "text")[None]
    fills, probability, _, counts = fill.fill(
        generator, judge, masked, masked == len(vocabulary) - 1, 7, 1e-3, 1
    )
    assert counts.tolist() == [7] and probability[0] > 0.9


def test_before_and_after_in_a_pipe(files, world, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # no out/checkpoint.pt here
    fill.main(["the c_t _at", "--k=4", *files])
    before = capsys.readouterr().out
    title, heads, *rows = before.splitlines()
    assert title == f"before  {world}/generator.pt" and heads.split() == [
        "probability",
        "judge",
        "drawn",
    ]
    assert rows and all(
        re.fullmatch(r" +\S+  [01]\.\d{3}   +\d/4  the c\[[a-z ]\]t \[[a-z ]\]at", row)
        for row in rows
    )
    fill.main(["the c_t _at", "--k=4", f"--checkpoint={world}/generator.pt", *files])
    both = capsys.readouterr().out
    assert both.startswith(before) and both[len(before) :] == before.replace(
        "before ", "after  "
    )  # the same model, the same draws
    fill.main(["the c_t _at", "--k=4", "--seed=2", *files])
    assert capsys.readouterr().out != before


def test_the_runs_own_checkpoint_is_found(files, world, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint.pt").write_bytes((world / "generator.pt").read_bytes())
    monkeypatch.chdir(tmp_path)
    fill.main(["th_", *files])
    assert "after   out/checkpoint.pt" in capsys.readouterr().out.splitlines()


def test_on_a_terminal_the_judge_shades(monkeypatch):
    monkeypatch.setattr(fill, "colours", lambda: True)
    shown = fill.shade("cat", [False, True, False], [1.0, 0.5, 0.0])
    assert re.sub(r"\033\[[\d;]*m", "", shown) == "cat"
    assert [int(red) for red in re.findall(r"48;5;(\d+)m", shown)] == [16, 88, 196] and shown.count(
        "\033[4;"
    ) == 1


def test_help_exits_0():
    with pytest.raises(SystemExit) as stopped:
        fill.main(["--help"])
    assert stopped.value.code == 0
