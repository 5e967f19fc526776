"""Check the lines that a run writes to replay.jsonl, and the page that shows them in a browser."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import run

from data.dataset import decode
from grpo.tools import replay
from grpo.tools.replay import unpack

BROWSER = shutil.which("chromium")
OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --virtual-time-budget=20000 --dump-dom"""


def lines_of(folder, out="out"):
    return [json.loads(line) for line in (folder / out / "replay.jsonl").read_text().splitlines()]


def probabilities(line, header):
    return unpack(line["probabilities"], len(header["vocabulary"])).astype(int)  # (n,V)


def steps_of(page):
    """List the steps that a page holds. Step 0 stands for the base model."""
    content = re.search('type="application/json">(.*?)</script>', page)[1]
    return [line["iteration"] + 1 for line in json.loads(content)["lines"]]


@pytest.mark.parametrize("generator", ["generator", "latent"])
def test_a_line_holds_what_the_step_drew_and_what_the_policy_says_after_it(
    flags, world, tmp_path, monkeypatch, generator
):
    """For each step, replay.jsonl records the group with the largest sum of |A|.

    The test computes `log_ratio` and `bounded` itself.
    """
    seen = []
    real = replay.record

    @torch.no_grad()
    def record(policy, held_out, config, step, rollout):
        real(policy, held_out, config, step, rollout)
        now = policy(rollout.batch).score(rollout.fills, policy(rollout.batch))
        seen.append((rollout, now.logp, policy(held_out.batch[: replay.INPUTS])))

    monkeypatch.setattr(replay, "record", record)
    start = world / f"{generator}.pt"
    run(flags, credit="word", num_iterations=2, generator_checkpoint=start)
    header, *lines = lines_of(tmp_path)
    for line, (rollout, logp, now) in zip(lines, seen, strict=True):
        A = rollout.advantages
        b = (A * rollout.batch.mask[:, None]).abs().sum(dim=(1, 2)).argmax()
        mask = rollout.batch.mask[b]
        assert line["fills"] == decode(rollout.fills.completions[b][:, mask])
        log_ratio = logp - rollout.old.logp
        expected = {
            "reward": rollout.reward,
            "advantage": A,
            "logp": rollout.old.logp,
            "log_ratio": log_ratio,
            "bounded": torch.where(A > 0, log_ratio.exp() > 1.2, log_ratio.exp() < 0.8) & (A != 0),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(line[name], values[b][:, mask], atol=1e-4, err_msg=name)
        where = now.batch.mask
        p = now.marginal().logits[where] / flags["temperature"]
        have = probabilities(line, header)
        np.testing.assert_allclose(have, 255 * p.softmax(dim=-1), atol=0.51, err_msg="p")
        assert line["guess"] == decode(now.best_guess()[where])[0]
    assert np.sum([np.sum(line["bounded"]) for line in lines]) > 0


def test_resuming_cuts_it_back_and_other_inputs_begin_it_anew(flags, tmp_path):
    run(flags, out_dir=tmp_path / "whole", max_iters=6, lr_decay_iters=6)
    run(flags, max_iters=3, lr_decay_iters=6)
    with open(tmp_path / "out" / "replay.jsonl", "a") as file:
        file.write('{"iteration": 3}\n{"iter')
    run(flags, max_iters=6, lr_decay_iters=6, init_from="resume")
    assert lines_of(tmp_path) == lines_of(tmp_path, "whole")
    run(flags, max_iters=8, masking="span", init_from="resume")
    assert steps_of(replay.page(tmp_path / "out")) == [0, 7, 8]


def browse(folder, address="", script=""):
    """Open the page of the run in `folder`, run `script` in it, and return the page's HTML."""
    page = replay.page(folder / "out").replace("</body>", f"<script>{script}</script></body>")
    (folder / "page.html").write_text(page)
    address = f"file://{folder}/page.html{address}"
    command = [BROWSER, *OPTIONS.split(), f"--user-data-dir={folder}/browser", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def hidden_words(header):
    """List each hidden word as (first blank, last blank + 1). Blanks are counted over all texts."""
    texts = " ".join(header["masked"])
    places = [(found.start(), len(found[0])) for found in re.finditer("_+", texts)]
    firsts = [texts[:start].count("_") for start, _ in places]
    return [(first, first + length) for first, (_, length) in zip(firsts, places)]


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_the_page_plays_when_asked_and_shows_what_the_run_recorded(flags, world, tmp_path):
    """The page waits for the button, then plays to the end. Of the words of four letters it shows
    the one that changed most.

    The test then opens the page at step 6 and word 2, and presses two keys to go on to step 7 and
    word 3. The page must show no error but the one that the test plants. The model has a latent, so
    its best guess need not hold each blank's likeliest letter.
    """
    start = world / "latent.pt"
    changes = {"masking": "random", "mask_ratio": 0.6, "credit": "word", "num_iterations": 2}
    run(flags, max_iters=8, generator_checkpoint=start, **changes)
    header, *lines = lines_of(tmp_path)
    line, vocabulary = lines[6], header["vocabulary"]
    base, now, end = [probabilities(each, header) for each in (header, line, lines[-1])]
    words = hidden_words(header)

    assert "step 0 of 8" in browse(tmp_path)
    played = browse(tmp_path, script='document.getElementById("play").click()')
    assert "step 8 of 8" in played
    four = [word for word in words if word[1] - word[0] == 4]
    most = max(four, key=lambda word: np.abs(end - base)[slice(*word)].sum())
    pressed = re.findall('class="word text" aria-pressed="(.*?)"', played)
    assert pressed == [str(word == most).lower() for word in words]

    clicked, letter = 2, 1  # the third best fill, and its second letter
    keys = f"""for (const key of ["ArrowRight", "ArrowDown"])
    document.dispatchEvent(new KeyboardEvent("keydown", {{key, bubbles: true}}));
    document.querySelectorAll("#group tr")[{clicked}].querySelectorAll("button")[{letter}].click();
    nonsense"""
    shown = browse(tmp_path, "#step=6&word=2", keys)
    assert "step 7 of 8" in shown
    errors = re.findall('role="alert">(.*?)<', shown)
    assert errors == ["error: Uncaught ReferenceError: nonsense is not defined "]

    fills = [(str(p[vocabulary.index(c)]), c) for p, c in zip(now, line["guess"], strict=True)]
    assert re.findall(r'data-p="(\d+)"[^>]*>(.)</span>', shown) == fills

    bars = []  # of each blank at most five letters, each with its share of the first one's bar
    for p in now[slice(*words[2])]:
        order = np.argsort(-p, kind="stable")[:5]
        bars += [(vocabulary[v], p[v], p[v] / p[order[0]]) for v in order if p[v] >= 2]
    pattern = r'data-letter="(.)" data-now="(\d+)" style="--share: ([.\d]+)">(.*?)</div>'
    shown_bars = re.findall(pattern, shown)
    assert [(c, int(p), pytest.approx(float(share))) for c, p, share, _ in shown_bars] == bars
    for _, p, _, text in shown_bars:
        assert f">{int(p) / 2.55:.0f} %<" in text

    A, q = np.array(line["advantage"]), np.exp(line["logp"])
    push = A * (1 - q)
    rows = re.findall(r'<tr data-fill="(.*?)">(.*?)</tr>', shown)
    order = np.argsort(-np.mean(line["reward"], axis=1), kind="stable")
    for i, (fill, cells) in zip(order, rows, strict=True):
        assert fill == line["fills"][i]
        pushes = [float(x) for x in re.findall('data-push="(.*?)"', cells)]
        np.testing.assert_allclose(pushes, push[i], atol=1e-9)

    at = order[clicked], letter
    numbers = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", shown)
    assert numbers == [
        ("reward", f"{line['reward'][at[0]][letter]:+.2f}".replace("-", "−")),
        ("advantage A", f"{A[at]:+.2f}".replace("-", "−")),
        ("q when drawn", f"{q[at]:.3f}"),
        ("push A(1 − q)", f"{push[at]:+.2f}".replace("-", "−")),
        ("ratio ρ", f"{np.exp(line['log_ratio'][at[0]][letter]):.3f}"),
        ("clipped", "yes" if line["bounded"][at[0]][letter] else "no"),
    ]
