"""Run fill and bench, each by its command, on a run of tiny models."""

import contextlib
import math
import re

import pytest
import torch
from conftest import command_line, run

from data.dataset import encode_prompt
from data.vocabulary import VOCABULARY
from grpo.run.checkpoint import load_model
from grpo.tools import bench, fill
from model.transformer import Generator


@pytest.fixture
def trained(flags, tmp_path, monkeypatch):
    """Go to a folder of its own, and make a run in `a` there."""
    monkeypatch.chdir(tmp_path)
    run(flags, out_dir="a", max_iters=1)


def printed(capsys, *arguments):
    """Run fill: -> {title: [the lines below it]}."""
    capsys.readouterr()
    fill.main(list(arguments))
    parts = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  "):
            [*parts.values()][-1].append(line)
        else:
            parts[line] = []
    return parts


@pytest.mark.parametrize("kind", ["generator", "latent"])
def test_fills_come_with_their_exact_probability(world, kind):
    """The two blanks of h_l_ are one word, which a latent draws together."""
    generator = load_model(world / f"{kind}.pt", Generator)
    torch.manual_seed(0)
    torch.nn.init.normal_(generator.head.weight)  # so that the values of the latent differ
    found = fill.fill(generator, "h_l_ me", k=200, temperature=0.7)
    with torch.no_grad():
        words = torch.tensor([[0, 1, 0, 1, 0, 0, 0]])
        *prior, letters = generator(encode_prompt("h_l_ me", 16, "text")[None], words)
    q = (letters.double() / 0.7).softmax(dim=-1)[0].view(7, -1, 28)  # (T,K,V)
    p_z = (prior[0][0, 1].double() / 0.7).softmax(dim=-1) if prior else torch.ones(1)  # (K,)
    for one in found:
        assert re.fullmatch("h[a-z ]l[a-z ] me", one.text)
        first, second = (q[t, :, VOCABULARY.index(one.text[t])] for t in (1, 3))  # (K,), (K,)
        exact = (p_z * first * second).sum().item()
        assert math.exp(one.log_prob) == pytest.approx(exact, rel=1e-4)
    assert 1 < len({one.text for one in found}) == len(found) < 200
    log_probs = [one.log_prob for one in found]
    assert log_probs == sorted(log_probs, reverse=True)
    assert found != fill.fill(generator, "h_l_ me", k=200, temperature=0.7, seed=2)


def test_a_run_is_shown_before_and_after(trained, world, capsys):
    parts = printed(capsys, "the c_t _at", "--run=a", "--k=4")
    assert list(parts) == [f"before  {world}/generator.pt", "after   a/checkpoint.pt"]
    for path, (heads, *rows) in zip((world / "generator.pt", "a/checkpoint.pt"), parts.values()):
        assert heads.split() == ["probability", "judge"]
        pattern = r" +[\d.e-]+  [01]\.\d{3}  the c\[([a-z ])\]t \[([a-z ])\]at"
        shown = [re.fullmatch(pattern, row).groups() for row in rows]
        found = fill.fill(load_model(path, Generator), "the c_t _at", k=4)
        assert shown == [(one.text[5], one.text[8]) for one in found]


def test_the_benchmark_times_the_parts_of_a_step(flags, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SECONDS", 0)
    bench.main(command_line(flags))
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[1] for line in lines if " ms " in line]
    assert names[0] == "whole step" and {"draw", "score", "reward"} < {*names}
    assert " 100.0%" in lines[1]


@pytest.mark.parametrize(
    "text, said",
    [
        ("9_+9_=11", "wrong"),  # no fill is right
        ("4__+4__=8_8", "=8["),
        ("4_7+4_7=Äb;", 'the model reads "4_7+4_7=ab"'),
        ("4_+__4_=8888", "text '4_+__4_=8888' has 12 characters, more than 11; shorten it"),
        ("4+4=8", "text '4+4=8' has no blank; write _ for each character to fill in"),
    ],
)
def test_bad_sums_are_filled_or_refused_with_one_line(text, said, capsys):
    with contextlib.suppress(SystemExit):
        fill.main([text, "--run=model/pretrained/sums.pt"])
    out, err = capsys.readouterr()
    assert said in out + err and bool(out) != (err.count("\n") == 1)
