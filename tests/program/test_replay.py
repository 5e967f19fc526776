"""Check the lines that a run writes to replay.jsonl, and the pages that show runs in a browser."""

import base64
import json
import re
from dataclasses import asdict

import numpy as np
import pytest
import torch
from conftest import browse, needs_browser, run

from data.vocabulary import decode
from grpo.plumbing.config import Config
from grpo.tools import replay


def lines_of(folder):
    lines = (folder / "out" / "replay.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def probabilities(line, header):
    packed = np.frombuffer(base64.b64decode(line["probabilities"]), "u1")
    return packed.reshape(-1, len(header["vocabulary"])).astype(int)  # (n,V)


@pytest.mark.parametrize("generator", ["generator", "latent"])
def test_a_line_holds_what_the_step_drew_and_what_the_policy_says_after_it(
    flags, world, tmp_path, monkeypatch, generator
):
    """For each step, replay.jsonl records the group with the largest sum of |A|.

    The test computes `log_ratio` and `bounded` itself. Of the held-out inputs, those with a single
    blank come last.
    """
    seen = []
    real = replay.record

    @torch.no_grad()
    def record(policy, held_out, config, step, rollout):
        real(policy, held_out, config, step, rollout)
        now = policy(rollout.batch).score(rollout.fills, policy(rollout.batch))
        several = [i for i, mask in enumerate(held_out.batch.mask) if mask.sum() > 1]
        one = [i for i, mask in enumerate(held_out.batch.mask) if mask.sum() == 1]
        seen.append((rollout, now.logp, policy(held_out.batch[(several + one)[: replay.INPUTS]])))

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


def test_other_inputs_begin_it_anew(flags, tmp_path):
    run(flags, max_iters=1)
    run(flags, max_iters=2, masking="span", init_from="resume")
    assert [line["iteration"] for line in lines_of(tmp_path)] == [-1, 1]


def test_no_text_of_a_run_can_close_the_script_of_its_page(flags, tmp_path):
    """A metric of one's own may be infinite, which JSON does not know."""
    out = tmp_path / "<!--"
    run(flags, max_iters=1, out_dir=out)
    text = (out / "metrics.jsonl").read_text(encoding="utf-8")
    text = re.sub('"entropy": [^,]*', '"entropy": Infinity', text)
    (out / "metrics.jsonl").write_text(text, encoding="utf-8")
    content = re.search('type="application/json">(.*?)</script>', replay.page(out))[1]
    assert "<" not in content and '"entropy": [null]' in content
    assert json.loads(content)["run"].endswith("<!--")


def with_script(folder, script):
    """Make the page of the run in `folder`, which runs `script` at its end: -> HTML."""
    return replay.page(folder / "out").replace("</body>", f"<script>{script}</script></body>")


@needs_browser
def test_the_page_plays_when_asked_and_explains_a_letter(flags, tmp_path):
    """The button plays to the end.

    The test then opens the page at step 6, presses a key to go on to step 7, and clicks on a letter
    of the best fill. The page must show no error but the one that the test plants.
    """
    run(flags, max_iters=8, masking="random", mask_ratio=0.6)
    line = lines_of(tmp_path)[7]
    play = 'document.getElementById("play").click()'
    assert "step 8 of 8" in browse(with_script(tmp_path, play), tmp_path)
    clicks = """document.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
    document.querySelector("#group tr").querySelectorAll("button")[1].click();
    nonsense"""
    shown = browse(with_script(tmp_path, clicks), tmp_path, "#step=6")
    assert "step 7 of 8" in shown
    errors = re.findall('role="alert">(.*?)<', shown)
    assert errors == ["error: Uncaught ReferenceError: nonsense is not defined "]

    best = np.argsort(-np.mean(line["reward"], axis=1), kind="stable")[0]
    assert re.findall(r'<tr data-fill="(.*?)">', shown)[0] == line["fills"][best]
    reward, A, logp, log_ratio, bounded = (
        line[name][best][1] for name in ("reward", "advantage", "logp", "log_ratio", "bounded")
    )
    numbers = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", shown)
    assert numbers == [
        ("reward", f"{reward:+.2f}".replace("-", "−")),
        ("advantage A", f"{A:+.2f}".replace("-", "−")),
        ("q when drawn", f"{np.exp(logp):.3f}"),
        ("push A(1 − q)", f"{A * (1 - np.exp(logp)):+.2f}".replace("-", "−")),
        ("ratio ρ", f"{np.exp(log_ratio):.3f}"),
        ("clipped", "yes" if bounded else "no"),
    ]


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Give a function that makes a run's folder in the working directory, with made-up metrics.

    `values` are those of the metric mean_reward in each step. A step takes as many seconds as the
    seed says.
    """
    monkeypatch.chdir(tmp_path)

    def make(name, values, seed=1, **changes):
        folder = tmp_path / name
        folder.mkdir()
        settings = asdict(Config(out_dir=name, seed=seed, **changes))
        (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        steps = [
            {"iteration": i, "mean_reward": x, "flat": 1, "step_ms": 1000 * seed, name: 0}
            for i, x in enumerate(values)
        ]
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8"
        )
        return name

    return make


def test_several_runs_make_a_page_of_curves_in_the_working_directory(recorded, capsys):
    outs = [recorded("a", [1, 2]), recorded("<b>", [3], seed=2), recorded("c", [4], kl_beta=0)]
    replay.main(outs)
    assert capsys.readouterr().out == "open in a browser: curves.html\n"
    content = re.search(
        'type="application/json">(.*?)</script>', open("curves.html", encoding="utf-8").read()
    )[1]
    assert "<" not in content
    first, second = json.loads(content)
    assert (first["settings"], second["settings"]) == ({"kl_beta": 0.65}, {"kl_beta": 0})
    assert [*first["runs"]] == outs[:2] and [*second["runs"]] == outs[2:]
    assert [line["mean_reward"] for line in first["runs"]["a"]] == [1, 2]


def drawn(tag, html):
    """Find the shapes of a kind, such as polylines: -> for each an array of points (n,2)."""
    shapes = re.findall(f'<{tag} points="(.*?)"', html)
    return [np.array([point.split(",") for point in x.split()], float) for x in shapes]


@needs_browser
def test_the_page_of_curves_draws_means_and_ranges(recorded, tmp_path):
    """A group's line ends where its shortest run ends.

    Each run has a metric of its own, and a metric is left out if no group has it in all of its
    runs. The test compares points within a picture, in which x and y are linear.
    """
    outs = [
        recorded("a", [0, 2, 9]),
        recorded("b", [0, 4], seed=3),
        recorded("<i>c", [0, 1, 2, 3], kl_beta=0.5, dataset="</script>"),
    ]
    html = replay.page_of_curves(outs)
    shown = browse(html, tmp_path, "#metric=mean_reward&against=seconds")
    assert re.findall('role="alert">(.*?)<', shown) == [""] and "NaN" not in shown
    names = ["mean_reward", "flat", "step_ms", "&lt;i&gt;c", "steps", "seconds"]
    assert re.findall("<option>(.*?)</option>", shown) == names
    chart = re.search('<svg id="chart".*?</svg>', shown, re.DOTALL)[0]
    group, single = drawn("polyline", chart)
    band, _ = drawn("polygon", chart)
    zero, size = single[0], single[-1] - single[0]  # `single` goes from 0 to 3, in 3 steps
    x, y = (3 * (group - zero) / size).T
    np.testing.assert_allclose(x, [1, 3], atol=1e-6)
    np.testing.assert_allclose(y, [0, 3], atol=1e-6)
    np.testing.assert_allclose(3 * ((band - zero) / size)[:, 1], [0, 2, 4, 0], atol=1e-6)
    assert re.findall("<b>(.*?)</b>", shown) == ["3 ± 1", "3"]
    assert re.findall('<div>(.*?)<span class="soft">(.*?)</span>', shown) == [
        ("dataset=text, kl_beta=0.65", "2 runs: a, b"),
        ("dataset=&lt;/script&gt;, kl_beta=0.5", "1 run: &lt;i&gt;c"),
    ]
    flat = browse(html, tmp_path, "#metric=flat&against=seconds")
    assert "NaN" not in flat and re.findall("<b>(.*?)</b>", flat) == ["1 ± 0", "1"]
