"""Check what a run records about its completions, and the page that shows runs in a browser."""

import json
import re

import pytest
import torch
from conftest import Letters, browse, needs_browser, read_jsonl, run, write_text

from data import dataset
from data.rules import check
from data.vocabulary import decode
from grpo.run.load import load_run
from grpo.tools import replay


def test_a_line_holds_one_draw_of_each_input_with_the_same_luck(flags, tmp_path, monkeypatch):
    """And whether the rule calls it good."""
    monkeypatch.setattr(dataset, "WordRule", lambda text: Letters("abcdefghijklmnopqrst"))
    run(flags, masking="short", learning_rate=0.1)
    lines = read_jsonl(tmp_path / "out" / "snapshots.jsonl")
    _, models, _, held_out = load_run(flags["out_dir"], {})
    batch = held_out.batch[:8]
    for line, policy in ((lines[0], models.base), (lines[-1], models.policy)):
        with torch.no_grad():
            y = policy(batch.masked).sample(batch).completions[:, :1]  # (8,1,T)
        assert line["completions"] == decode(y)
        assert line["good"] == check(held_out.rule, y, batch.masked)[:, 0].tolist()
    assert lines[0]["texts"] == decode(batch.tokens) and lines[0]["masked"] == decode(batch.masked)
    assert [line["iteration"] for line in lines] == [-1, 0, 1, 2, 3]
    assert lines[0]["completions"] != lines[-1]["completions"]
    assert {True, False} == {*lines[0]["good"]}


HEADER = {
    "texts": ["41+47=88", "12+13=25"],
    "masked": ["__+__=88", "1_+1_=25"],
}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Give a function that makes a run's folder in the working directory, with made-up lines."""
    monkeypatch.chdir(tmp_path)

    def make(name, completions, settings=None, rule="correct", **metrics):
        """`completions` has a list of texts for each line, and `metrics` numbers by name."""
        folder = tmp_path / name
        config = {"out_dir": name, "seed": 1, "rule": rule} | (settings or {})
        write_text(folder / "config.json", json.dumps(config))
        steps = [dict(zip(metrics, values)) for values in zip(*metrics.values())]
        lines = {
            "metrics.jsonl": [{"iteration": i, **step} for i, step in enumerate(steps)],
            "snapshots.jsonl": [
                {"iteration": i, "completions": texts} for i, texts in enumerate(completions, -1)
            ],
        }
        for line in lines["snapshots.jsonl"][:1]:
            line |= HEADER
        for line in lines["snapshots.jsonl"] if rule else []:
            line["good"] = [text in ("41+47=88", "44+44=88") for text in line["completions"]]
        for file, content in lines.items():
            text = "".join(json.dumps(line) + "\n" for line in content)
            write_text(folder / file, text)
        return name

    return make


FILLS = [["41+44=88", "13+13=25"], ["44+44=88", "14+12=25"], ["42+44=88", "11+11=25"]]


def test_a_page_works_offline_and_no_text_of_a_run_can_close_its_script(recorded, tmp_path):
    """One run's page goes into its folder, and that of several into the working directory."""
    evil = "</script><!--"
    outs = [recorded("<b>", [[evil, evil]], {"dataset": evil}, correct=[0.2])]
    outs.append(recorded("b", FILLS, correct=[0.2]))
    for folders, page in {(outs[1],): "b/replay.html", (*outs,): "replay.html"}.items():
        replay.main([*folders])
        html = (tmp_path / page).read_text(encoding="utf-8")
        assert not re.search(r"(src|href)=|url\(|@import", html)
    content = re.search('type="application/json">(.*?)</script>', html)[1]
    assert "<" not in content
    shown = json.loads(content)
    assert shown["labels"][0] == f"dataset={evil}"
    first, _ = shown["runs"]
    assert first["name"] == "<b>" and first["snapshots"][0]["completions"] == [evil, evil]


def open_page(folders, folder, script=""):
    """Open the page of these runs, and run a script at its end: -> its HTML, data left out."""
    html = replay.make_page(folders).replace("</body>", f"<script>{script}</script></body>")
    return re.sub("<script.*?</script>", "", browse(html, folder), flags=re.DOTALL)


def numbers(html):
    """List the captions of the curves, each with its numbers."""
    captions = re.findall("<figcaption>(.*?)</figcaption>", html)
    return [" ".join(re.sub("<.*?>", " ", caption).split()) for caption in captions]


def cards(html):
    """List for each input what the page shows: truth, before, now. A [blank] is followed by + or -.

    They stand for green and orange.
    """
    texts = re.findall("<dd>(.*?)(?:<small>.*?</small>)?</dd>", html)
    for old, new in {' class="good"': "+", ' class="bad"': "-", "": ""}.items():
        texts = [re.sub(f"<mark{old}>(.)</mark>", rf"[\1]{new}", text) for text in texts]
    return [texts[i : i + 3] for i in range(0, len(texts), 3)]


SLIDE = "$('slider').value = 1; $('slider').dispatchEvent(new Event('input'));"


@needs_browser
def test_the_slider_moves_fills_and_numbers(recorded, tmp_path):
    out = recorded(
        "out",
        FILLS,
        correct=[0.25, 0.5],
        accepts=[0.75, 1],
        mean_kl=[0, 2],
        frac_reward_zero_std=[0.5, 0],
        mean_reward=[-2, 1],
    )
    html = open_page([out], tmp_path)
    assert "step 2 of 2: 0 of 2 good (before: 0 of 2)" in html
    assert numbers(html)[0] == "correct 0.500 judge accepts 1.000"
    html = open_page([out], tmp_path, SLIDE)
    assert "step 1 of 2: 1 of 2 good (before: 0 of 2)" in html
    assert '<span id="noun">correct</span>' in html
    assert cards(html) == [
        ["[4][1]+[4][7]=88", "[4]-[1]-+[4]-[4]-=88", "[4]+[4]++[4]+[4]+=88"],
        ["1[2]+1[3]=25", "1[3]-+1[3]-=25", "1[4]-+1[2]-=25"],
    ]
    assert numbers(html) == [
        "correct 0.250 judge accepts 0.750",
        "KL 0.000",
        "dead groups 0.500",
        "mean reward −2.000",
    ]
    html = open_page([out], tmp_path, "$('play').click();")  # from the first line to the last
    assert "step 2 of 2" in html and "▶ play" in html
