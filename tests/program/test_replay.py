"""replay.jsonl, what a run records of itself, and the page that is made of it, in a browser."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import run
from grpo.mixture import likeliest, marginal

from data.words import decode
from grpo.plumbing import recorder
from grpo.plumbing.checkpoint import load_model
from grpo.plumbing.recorder import unpack
from grpo.tools import replay

BROWSER = shutil.which("chromium")
OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --virtual-time-budget=2000 --dump-dom"""


def lines_of(folder, out="out"):
    return [json.loads(line) for line in (folder / out / "replay.jsonl").read_text().splitlines()]


def probabilities(line, header):
    return unpack(line["probabilities"], "u1", len(header["vocabulary"]))  # (n,V)


def of_draws(line):
    """-> rewards, advantages, log-probabilities, (G,n) each."""
    n = len(line["fills"][0])
    return [unpack(line[x], "f2", n).astype(float) for x in ("rewards", "advantages", "logp")]


def test_a_line_holds_what_the_step_drew(flags, tmp_path, monkeypatch):
    """Of the group that it pushed most."""
    rollouts = []
    real = recorder.record
    monkeypatch.setattr(recorder, "record", lambda *args: (rollouts.append(args[-1]), real(*args)))
    run(flags, credit="run")
    header, *lines = lines_of(tmp_path)
    for line, rollout in zip(lines, rollouts, strict=True):
        pushes = rollout.advantages * rollout.inputs.mask[:, None]
        most = rollout.take(pushes.abs().sum(dim=(1, 2)).argmax())
        mask = most.inputs.mask
        assert line["fills"] == decode(most.fills.completions[:, mask], header["vocabulary"])
        for have, want in zip(of_draws(line), (most.credits, most.advantages, most.old.logp)):
            np.testing.assert_allclose(have, want[:, mask], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("generator", ["generator", "mixture"])
def test_a_line_holds_what_the_policy_says_after_the_step(flags, world, tmp_path, generator):
    start = world / f"{generator}.pt"
    run(flags, generator_checkpoint=start)
    header, *_, last = lines_of(tmp_path)
    vocabulary = header["vocabulary"]
    masked = torch.tensor([[vocabulary.index(c) for c in text] for text in header["masked"]])
    mask, temperature = masked == len(vocabulary) - 1, flags["temperature"]
    for path, line in {start: header, tmp_path / "out" / "checkpoint.pt": last}.items():
        logits = load_model(path, "generator", vocabulary)(masked).detach()
        p = (marginal(logits, mask, temperature)[mask] / temperature).softmax(dim=-1)
        np.testing.assert_allclose(probabilities(line, header), 255 * p, atol=0.51)
        guess = likeliest(logits, masked, mask, temperature)[mask]
        assert line["guess"] == "".join(vocabulary[c] for c in guess)


def test_of_a_large_group_the_first_fills_are_recorded_and_false_leaves_all_out(flags, tmp_path):
    run(flags, masking="random", mask_ratio=1, group_size=64, max_iters=2)
    header, *lines = lines_of(tmp_path)
    assert [len(line["fills"]) for line in lines] == [200 // 16] * 2  # of 16 blanks
    run(flags, replay="false", max_iters=1)
    assert not (tmp_path / "out" / "replay.jsonl").exists()


def test_resuming_cuts_it_back_and_other_inputs_begin_it_anew(flags, tmp_path):
    run(flags, out_dir=tmp_path / "whole", max_iters=6, lr_decay_iters=6)
    run(flags, max_iters=3, lr_decay_iters=6)
    with open(tmp_path / "out" / "replay.jsonl", "a") as file:
        file.write('{"iteration": 3}\n{"iter')
    run(flags, max_iters=6, lr_decay_iters=6, init_from="resume")
    assert lines_of(tmp_path) == lines_of(tmp_path, "whole")
    run(flags, max_iters=8, masking="span", init_from="resume")
    assert [line["iteration"] for line in lines_of(tmp_path)] == [-1, 6, 7]
    assert '"steps": [0, 7, 8]' in replay.page(tmp_path / "out")


def test_without_a_replay_the_tool_says_so_and_a_cut_line_is_left_out(flags, tmp_path, capsys):
    run(flags, max_iters=2)
    file = tmp_path / "out" / "replay.jsonl"
    good = file.read_text()
    for text, said in {
        good.splitlines()[
            0
        ]: "is missing or holds no step; name the out_dir of a run, made without",
        good.replace('"format": 2', '"format": 1'): "has format 1, not 2; make the run again",
    }.items():
        file.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            replay.main([str(file.parent)])
        assert said in capsys.readouterr().err.splitlines()[-1]
    file.write_text(good[:-9])
    assert '"steps": [0, 1]' in replay.page(file.parent)


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_the_page_shows_what_the_run_recorded(flags, world, tmp_path):
    """Where two keys lead: at step 7 the second input's second word. An error would be seen.

    With a latent, so that the best guess need not be each blank's own.
    """
    run(flags, max_iters=8, credit="run", generator_checkpoint=world / "mixture.pt")
    header, *lines = lines_of(tmp_path)
    line, vocabulary = lines[6], header["vocabulary"]
    keys = """for (const key of ["ArrowRight", "ArrowDown"])
    document.dispatchEvent(new KeyboardEvent("keydown", {key})); nonsense"""
    page = replay.page(tmp_path / "out").replace("</body>", f"<script>{keys}</script>")
    (tmp_path / "page.html").write_text(page)
    address = f"file://{tmp_path}/page.html#step=6&input=2"
    command = [BROWSER, *OPTIONS.split(), f"--user-data-dir={tmp_path}/browser", address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert "step 7 of 8" in shown
    errors = re.findall('role="alert">(.*?)<', shown)
    assert errors == ["error: Uncaught ReferenceError: nonsense is not defined "]

    now, base = probabilities(line, header), probabilities(header, header)
    fills = [(str(p[vocabulary.index(c)]), c) for p, c in zip(now, line["guess"], strict=True)]
    assert re.findall(r'data-p="(\d+)"[^>]*>(.)</span>', shown) == fills

    texts = " ".join(header["masked"])
    word = list(re.finditer("_+", texts))[len(re.findall("_+", header["masked"][0])) + 1]
    first = texts[: word.start()].count("_")
    often = np.max([probabilities(each, header) for each in (header, *lines)], axis=0)
    bars = [
        (letter, str(now[n, v]), str(base[n, v]))
        for n in range(first, first + len(word[0]))
        for v, letter in enumerate(vocabulary)
        if often[n, v] >= 0.05 * 255
    ]
    assert bars
    assert re.findall(r'data-letter="(.)" data-now="(\d+)" data-base="(\d+)"', shown) == bars

    rewards, advantages, logp = of_draws(line)
    rows = re.findall(r'<tr data-fill="(.*?)" data-reward="(.*?)">(.*?)</tr>', shown)
    for i, (fill, reward, cells) in zip(np.argsort(-rewards.mean(axis=1)), rows, strict=True):
        assert fill == line["fills"][i]
        push = [float(x) for x in re.findall('data-push="(.*?)"', cells)]
        want = advantages[i] * (1 - np.exp(logp[i]))
        np.testing.assert_allclose([float(reward), *push], [rewards[i].mean(), *want], atol=6e-4)
