"""Compare grpo/tools/toy.html, in a browser, with the toy in Python."""

import json
import re
import shutil
import subprocess
from math import log
from pathlib import Path

import pytest
import torch

from grpo.advantage import group_advantages
from grpo.tools import toy

BROWSER = shutil.which("chromium")
OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --virtual-time-budget=20000 --dump-dom"""
TITLES = ["expected reward", "KL", "entropy", "loss"]
OBJECTIVES = ["clip", "cispo", "sapo", "gmpo", "dppo"]
# Each objective has a case with each policy. Three other settings take both of their values, but
# not in all combinations.
CASES = [
    {
        "objective": objective,
        "n_latent": n_latent,
        "kl_beta": (0.0, 0.4)[(i + n_latent) % 2],
        "baseline": ("mean", "leave_one_out")[i // 2 % 2],
        "scale_rewards": ("none", "group")[i // 4],
        "num_iterations": 2,
        "learning_rate": 1.0,
    }
    for i, objective in enumerate(OBJECTIVES)
    for n_latent in (1, 2)
]
# The page makes the steps of each case, with draws from a file.
SCRIPT = """<script>
const { cases, draws } = FILE, found = cases.map(one => {
  const reference = begin(one.n_latent);
  let table = reference;
  return draws.map(uniforms => {
    const next = grpoStep(table, reference, draw(table, uniforms), { ...PLAIN, ...one });
    table = next.table;
    const { words, ...figures } = look(table, reference, PLAIN.rewards);
    return { ...words, ...figures, loss: next.loss };
  });
});
const place = document.createElement("pre");
place.textContent = JSON.stringify(found);
document.body.append(place);
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Open the page: -> its HTML, and the figures of each step of each case."""
    folder = tmp_path_factory.mktemp("page")
    uniforms = [toy.draw_batch(step, toy.Settings()).uniforms[0] for step in range(100)]
    draws = [of_step[:, toy.MASK[0]].tolist() for of_step in uniforms]
    script = SCRIPT.replace("FILE", json.dumps({"cases": CASES, "draws": draws}))
    text = Path(toy.__file__).with_suffix(".html").read_text()
    (folder / "page.html").write_text(text.replace("</body>", script))
    command = [BROWSER, *OPTIONS.split(), f"--user-data-dir={folder}/browser"]
    address = f"file://{folder}/page.html"
    shown = subprocess.run([*command, address], capture_output=True, text=True, timeout=60).stdout
    assert re.findall('role="alert">(.*?)<', shown) == [""]
    return shown, json.loads(re.search("<pre>(.*)</pre>", shown)[1])


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_the_page_opens_on_the_step_by_hand(page):
    """At first it shows the numbers of one step, which we compute with the toy in Python."""
    rewards = torch.tensor([*toy.WORDS.values()], dtype=torch.float64)  # (G,) each word in turn
    A = group_advantages(rewards.view(1, 4, 1), toy.MASK[:, :1], toy.Settings()).flatten()
    want = {"heads-chance": 0.5, "tails-chance": 0.5, "pull-0": 0, "pull-1": 0}
    for name, n_latent in (("product", 1), ("latent", 2)):
        before, after = toy.train(n_latent=n_latent, max_iters=1)
        seen = before | {"loss": after["loss"]}
        want |= {f"{name}-{title}": seen[x] for x, title in zip(seen, [*toy.WORDS, *TITLES])}
        for i, (r, a) in enumerate(zip(rewards, A)):
            want |= {f"{name}-reward-{i}": r, f"{name}-baseline-{i}": r - a}
            want |= {f"{name}-advantage-{i}": a}

    given = toy.Table(2).logits.detach().softmax(dim=-1)[0]  # (T,K,V)
    before, after = toy.train(max_iters=1)
    for t, letter in enumerate("ep"):
        odds = []
        for when, row in (("now", before), ("after", after)):
            q = sum(row[word] for word in toy.WORDS if letter in word)
            want |= {f"{when}-{letter}": q} | {
                f"{when}-{x}": row[x] for x in (*toy.WORDS, "reward")
            }
            odds.append(log(q / (1 - q)))
        pushes = [a * ((letter in word) - 0.5) for word, a in zip(toy.WORDS, A)]
        want |= {f"push-{i}-{t}": push for i, push in enumerate(pushes)}
        want |= {f"sum-{t}": sum(pushes) / 8, f"move-{t}": (odds[1] - odds[0]) / 2}
        for z, side in enumerate(["heads", "tails"]):
            want[f"{side}-{letter}"] = given[2 * t + 1, z, toy.VOCABULARY.index(letter)]
    numbers = re.findall('<data data-name="(.*?)" value="([-+.e0-9]+)">', page[0])
    have = {name: float(x) for name, x in numbers}
    assert have == pytest.approx({x: float(y) for x, y in want.items()}, rel=0, abs=1e-6)


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
@pytest.mark.parametrize(
    "n", range(len(CASES)), ids=lambda n: "-".join(map(str, CASES[n].values()))
)
def test_a_hundred_steps_of_the_page_are_those_of_the_toy(page, n):
    rows = toy.train(**CASES[n])[1:]
    for step, (have, want) in enumerate(zip(page[1][n], rows, strict=True), 1):
        assert have == pytest.approx({x: want[x] for x in have}, rel=0, abs=1e-4), step


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_the_page_offers_what_was_compared(page):
    offered = re.findall(r'<option(?: value="(\w+)")?>([^<]*)', page[0])
    compared = ("objective", "baseline", "scale_rewards")
    assert {value or text for value, text in offered} == {x[y] for x in CASES for y in compared}
