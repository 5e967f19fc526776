"""replay.jsonl, what a run records of itself, and the page that is made of it, in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run

from grpo.plumbing import recorder
from grpo.plumbing.checkpoint import load_model
from grpo.plumbing.recorder import unpack
from grpo.tools import replay

BROWSER = shutil.which("chromium")
OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --virtual-time-budget=2000 --dump-dom"""


def lines_of(folder):
    return [json.loads(line) for line in (Path(folder) / "replay.jsonl").read_text().splitlines()]


def probabilities(line, header):
    return unpack(line["probabilities"], "u1", len(header["vocabulary"]))  # (n,V)


def of_draws(line):
    """-> rewards, advantages, log-probabilities, (G,n) each."""
    n = len(line["fills"][0])
    return [unpack(line[x], "f2", n).astype(float) for x in ("rewards", "advantages", "logp")]


def test_a_line_holds_what_the_step_drew_and_what_the_policy_says_after_it(flags, monkeypatch):
    rollouts = []
    real = recorder.record
    monkeypatch.setattr(recorder, "record", lambda *args: (rollouts.append(args[-1]), real(*args)))
    run(flags, credit="run")
    header, *lines = lines_of(flags["out_dir"])
    for line, rollout in zip(lines, rollouts, strict=True):
        mask = rollout.inputs.mask[:, None].expand(rollout.advantages.shape)
        sizes = [a[m].abs().sum() for a, m in zip(rollout.advantages, mask)]
        i = sizes.index(max(sizes))
        drawn = rollout.fills.completions[i][mask[i]]
        assert "".join(line["fills"]) == "".join(header["vocabulary"][c] for c in drawn)
        for have, x in zip(of_draws(line), (rollout.credits, rollout.advantages, rollout.old.logp)):
            np.testing.assert_allclose(have.flatten(), x[i][mask[i]], rtol=1e-3, atol=1e-4)
    vocabulary = header["vocabulary"]
    masked = torch.tensor([[vocabulary.index(c) for c in text] for text in header["masked"]])
    paths = {flags["generator_checkpoint"]: header, f"{flags['out_dir']}/checkpoint.pt": lines[-1]}
    for path, line in paths.items():
        model = load_model(path, "generator", vocabulary)
        logits = model(masked)[masked == len(vocabulary) - 1].detach()
        want = 255 * (logits / flags["temperature"]).softmax(dim=-1)
        np.testing.assert_allclose(probabilities(line, header), want, atol=0.51)


def test_a_line_is_small_whatever_the_settings_and_false_leaves_all_out(flags):
    run(flags, masking="random", mask_ratio=1, group_size=64, max_iters=2)
    header, *lines = lines_of(flags["out_dir"])
    assert len(lines) == 2 and all(len(json.dumps(line)) <= 6000 for line in lines)
    assert 1 < len(lines[0]["fills"]) < 64
    run(flags, replay="false", max_iters=1)
    assert not Path(flags["out_dir"], "replay.jsonl").exists()


def test_resuming_cuts_it_back_and_other_inputs_begin_it_anew(flags, tmp_path):
    run(flags, out_dir=tmp_path / "whole", max_iters=6, lr_decay_iters=6)
    run(flags, max_iters=3, lr_decay_iters=6)
    with open(tmp_path / "out" / "replay.jsonl", "a") as file:
        file.write('{"iteration": 3}\n{"iter')
    run(flags, max_iters=6, lr_decay_iters=6, init_from="resume")
    assert lines_of(tmp_path / "out") == lines_of(tmp_path / "whole")
    run(flags, max_iters=8, masking="span", init_from="resume")
    assert [line["iteration"] for line in lines_of(tmp_path / "out")] == [-1, 6, 7]


def test_without_a_replay_the_tool_says_so_and_a_cut_line_is_left_out(flags, tmp_path, capsys):
    run(flags, max_iters=2)
    file = tmp_path / "out" / "replay.jsonl"
    good = file.read_text()
    header, *_ = good.splitlines()
    for text, said in {
        None: "is missing or holds no step; name the out_dir of a run, made without --replay=false",
        header: "is missing or holds no step",
        good.replace('"format": 1', '"format": 0'): "has format 0, not 1; make the run again",
    }.items():
        file.unlink() if text is None else file.write_text(text)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            replay.main([str(tmp_path / "out")])
        err = capsys.readouterr().err
        assert end.value.code == 2 and said in err and err.count("\n") == 1
    file.write_text(good[:-9])
    replay.main([str(tmp_path / "out")])
    assert "replay.html" in capsys.readouterr().out


def seen(page, where, tmp_path):
    """The document that the browser builds."""
    (tmp_path / "page.html").write_text(page)
    address = f"file://{tmp_path}/page.html#{where}"
    command = [BROWSER, *OPTIONS.split(), f"--user-data-dir={tmp_path}/browser", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_the_page_shows_what_the_run_recorded(flags, tmp_path):
    run(flags, max_iters=8, credit="run")
    header, *lines = lines_of(tmp_path / "out")
    line, vocabulary = lines[6], header["vocabulary"]
    page = replay.page(str(tmp_path / "out"))
    document = seen(page, "step=7&input=2", tmp_path)
    assert '<p id="error" role="alert"></p>' in document and "step 7 of 8" in document

    now, base = probabilities(line, header), probabilities(header, header)
    fills = [(str(p.max()), vocabulary[p.argmax()]) for p in now]
    assert re.findall(r'data-p="(\d+)"[^>]*>(.)</span>', document) == fills

    first = header["masked"][0].count("_")
    word = range(first, first + len(re.search("_+", header["masked"][1])[0]))
    often = np.stack([probabilities(each, header) for each in (header, *lines)]).max(axis=0)
    bars = [
        (letter, str(now[n, v]), str(base[n, v]))
        for n in word
        for v, letter in enumerate(vocabulary)
        if often[n, v] >= 0.05 * 255
    ]
    assert bars
    assert re.findall(r'data-letter="(.)" data-now="(\d+)" data-base="(\d+)"', document) == bars

    rewards, advantages, logp = of_draws(line)
    order = sorted(range(len(rewards)), key=lambda i: -rewards[i].mean())
    rows = re.findall(r'<tr data-fill="(.*?)" data-reward="(.*?)">(.*?)</tr>', document)
    assert [row[0] for row in rows] == [line["fills"][i] for i in order]
    for i, (_, reward, cells) in zip(order, rows):
        assert float(reward) == pytest.approx(rewards[i].mean(), abs=6e-4)
        push = [float(x) for x in re.findall('data-push="(.*?)"', cells)]
        assert push == pytest.approx(advantages[i] * (1 - np.exp(logp[i])), abs=6e-4)


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_keys_move_and_an_error_is_shown(flags, tmp_path):
    run(flags, max_iters=2)
    page = replay.page(str(tmp_path / "out"))
    keys = "for (const key of ['ArrowRight', 'ArrowDown', 'ArrowDown'])"
    keys += "document.dispatchEvent(new KeyboardEvent('keydown', {key}));"
    document = seen(page.replace("</body>", f"<script>{keys}</script>"), "step=1", tmp_path)
    assert "step 2 of 2" in document
    pressed = re.findall(r'class="word text" aria-pressed="(\w+)"', document)
    assert [i for i, on in enumerate(pressed) if on == "true"] == [2]
    broken = page.replace("buildTexts();", "buildText();")
    assert "error: Uncaught ReferenceError" in seen(broken, "", tmp_path)
