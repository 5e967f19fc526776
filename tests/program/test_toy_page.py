"""Compare grpo/tools/toy.html, in a browser, with the toy in Python."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import browse, command_line, needs_browser

from grpo.advantage import group_advantages
from grpo.tools import toy

STEPS = 30
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
    return { ...look(table, reference, PLAIN.rewards), loss: next.loss };
  });
});
const place = document.createElement("pre");
place.textContent = JSON.stringify(found);
document.body.append(place);
</script></body>"""


def opened(folder, script):
    """Open the page with `script` at its end, and check that it reports no error: -> its HTML."""
    text = Path(toy.__file__).with_suffix(".html").read_text(encoding="utf-8")
    shown = browse(text.replace("</body>", script), folder)
    assert re.findall('role="alert">(.*?)<', shown) == [""]
    return shown


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Open the page: -> its HTML, and the figures of each step of each case."""
    uniforms = [toy.draw_batch(step, toy.settings_of([])).uniforms[0] for step in range(STEPS)]
    draws = [of_step[:, toy.MASK[0]].tolist() for of_step in uniforms]
    script = SCRIPT.replace("FILE", json.dumps({"cases": CASES, "draws": draws}))
    shown = opened(tmp_path_factory.mktemp("page"), script)
    return shown, json.loads(re.search("<pre>(.*)</pre>", shown)[1])


@needs_browser
def test_the_page_opens_on_the_step_by_hand(page):
    """At first it shows the numbers of one step, which we compute with the toy in Python."""
    rewards = torch.tensor([*toy.WORDS.values()], dtype=torch.float64)  # (G,) each word in turn
    batch = SimpleNamespace(mask=toy.MASK[:, :1])
    A = group_advantages(rewards.view(1, 4, 1), None, batch, toy.settings_of([])).flatten()
    want = {}
    for name, n_latent in (("product", 1), ("latent", 2)):
        before, after = toy.train([f"--n_latent={n_latent}", "--max_iters=1"])
        want |= {f"{name}-{x}": y for x, y in before.items()} | {f"{name}-loss": after["loss"]}
        want |= {f"{name}-after-{x}": after[x] for x in before}
        for i, (r, a) in enumerate(zip(rewards, A)):
            want |= {f"{name}-reward-{i}": r, f"{name}-baseline-{i}": r - a}
            want |= {f"{name}-advantage-{i}": a}

    pushes = {word: A[i] / 2 * (1 if word[1] == "e" else -1) for i, word in enumerate(toy.WORDS)}
    want |= {f"push-{i}-0": push for i, push in enumerate(pushes.values())}
    want["sum-0"] = sum(pushes.values()) / 8
    numbers = dict(re.findall('<data data-name="(.*?)" value="([-+.e0-9]+)">', page[0]))
    have = {name: float(numbers[name]) for name in want}
    assert have == pytest.approx({x: float(y) for x, y in want.items()}, rel=0, abs=1e-6)


@needs_browser
@pytest.mark.parametrize(
    "n", range(len(CASES)), ids=lambda n: "-".join(map(str, CASES[n].values()))
)
def test_the_steps_of_the_page_are_those_of_the_toy(page, n):
    rows = toy.train(command_line(CASES[n], max_iters=STEPS))[1:]
    for step, (have, want) in enumerate(zip(page[1][n], rows, strict=True), 1):
        assert have == pytest.approx({x: want[x] for x in have}, rel=0, abs=1e-4), step


@needs_browser
def test_the_page_offers_what_was_compared(page):
    offered = re.findall(r'<option(?: value="(\w+)")?>([^<]*)', page[0])
    compared = ("objective", "baseline", "scale_rewards")
    assert {value or text for value, text in offered} == {x[y] for x in CASES for y in compared}


@needs_browser
def test_what_one_can_try_runs_for_a_hundred_steps_and_draws_curves(page, tmp_path):
    """At step 0 there are no curves. Later each of the three has a point for each step.

    After 100 steps all draws are equal, and the page says what that means.
    """
    press = """<script>document.querySelector("[data-try]").click()</script></body>"""
    shown = opened(tmp_path, press)
    for html, step in ((page[0], 0), (shown, 100)):
        assert re.search('<output id="at".*?>(.*?)<', html)[1] == f"step {step}"
        lines = re.findall(r'<polyline class="\w+" points="([-\d., e]+)"', html)
        assert [len(line.split()) for line in lines] == [step + 1] * 6 * bool(step)
        assert ('id="far" hidden' in html) == (step == 0)
        about = re.search('id="about">(.*?)<', html)[1]
        assert ("only the KL acts now" in about) == (step == 100)
