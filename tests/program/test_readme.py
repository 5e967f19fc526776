"""Check the commands, names, links, numbers and rewards in the READMEs."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import BLANK, encode

from grpo.advantage import compute_advantages
from grpo.batch import make_batch
from grpo.evaluation import __main__ as evaluation
from grpo.experiments import fair, supervised, through
from grpo.experiments import text as text_experiment
from grpo.run.arguments import read_arguments
from grpo.run.config import Config, load_config
from grpo.tools import fill, toy
from model import pretrain

FOLDERS = "config", "data", "grpo", "model"
PAGES = [Path("README.md"), *(page for folder in FOLDERS for page in Path(folder).rglob("*.md"))]
READMES = {str(page): page.read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PROSE = {name: FENCE.sub("", text) for name, text in READMES.items()}  # without blocks of code


def all_commands():
    """List the commands in the READMEs, from their ```sh blocks and from their inline code."""
    found = []
    for name, text in READMES.items():
        for language, block in FENCE.findall(text):
            if language == "sh":
                for line in filter(None, block.splitlines()):
                    found += line.split(" && ")
        found += re.findall(r"`((?:python|torchrun) [^`]+)`", " ".join(PROSE[name].split()))
    return [
        command for command in dict.fromkeys(found) if len(command.split()) > 3 or ".py" in command
    ]


READERS = {
    "train_grpo": load_config,
    "grpo.experiments.supervised": supervised.read,
    "grpo.experiments.fair": fair.read,
    "grpo.experiments.through": through.read,
}
SETTINGS = {
    "model.pretrain": pretrain.Settings,
    "grpo.tools.toy": Config,
    "grpo.tools.fill": fill.Settings,
    "grpo.evaluation": evaluation.Settings,
    "grpo.experiments.text": text_experiment.Settings,
}
NO_FLAGS = "venv pytest timeit grpo.one_file grpo.tools.replay grpo.experiments.compare".split()
NAMES = "gradient grid ladder figures strengths tokens_claims".split()
NO_FLAGS += [f"grpo.experiments.{name}" for name in NAMES]


@pytest.mark.parametrize("command", all_commands())
def test_every_command_is_understood(command):
    """The program's own reader reads it."""
    program, *words = shlex.split(command)
    if program not in ("python", "torchrun") or {"-c", "--help"} & {*words}:
        return
    words = [word for word in words if not word.startswith("--nproc") and word != "..."]
    file = words.pop(0)
    module = words.pop(0) if file == "-m" else file.removesuffix(".py")
    if module in READERS:
        READERS[module](words)
    elif module in SETTINGS:
        read_arguments(SETTINGS[module], words)
    else:
        assert module in NO_FLAGS


def test_every_file_and_test_named_exists():
    tests = "".join(path.read_text(encoding="utf-8") for path in Path("tests").rglob("test_*.py"))
    for name, text in PROSE.items():
        for path in re.findall(r"`((?:grpo|model|data|config|tests)/[\w/]+\.\w+)`", text):
            assert Path(path).exists() or path.startswith("data/mine"), (name, path)
        for test in re.findall(r"`(test_\w+)`", text):
            assert f"def {test}(" in tests, (name, test)


def anchors(path):
    """List the anchors of a Markdown file, made from its headings as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", READMES)
def test_every_link_leads_somewhere(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", PROSE[name]):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = Path(name).parent / file if file else Path(name)
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_lessons_numbers_are_the_toys():
    """The table has the probabilities of a step, and the text the rewards and the advantages."""
    lesson = READMES["grpo/README.md"].replace("−", "-")
    (table,) = re.findall(r"^\| \| `help` .*\n.*\n((?:\|.*\n)+)", lesson, re.MULTILINE)
    shown = [re.findall(r"-?\.\d+", row)[:4] for row in table.splitlines()]
    steps = [[f"{step[word]:.3f}"[1:] for word in toy.WORDS] for step in toy.train()]
    assert len(shown) == 2 and all(row in steps for row in shown)
    rewards = torch.tensor([[*toy.WORDS.values()]])  # (1,G)
    advantages = compute_advantages(rewards, Config())[0].tolist()
    lesson = " ".join(lesson.split())
    r, A = ([f"{x:.1f}" for x in values] for values in (toy.WORDS.values(), advantages))
    assert f"`help` {r[0]}, `half` {r[1]}, `helf` {r[2]} and `halp` {r[3]}" in lesson
    assert f"= {A[0]}, and the others have {A[1]}, {A[2]} and {A[3]}" in lesson


def test_the_lessons_answers_are_the_toys():
    """Which letters a second update clips, and what that does to `help`."""
    lesson = " ".join(READMES["grpo/README.md"].split())
    flags = "--max_iters=1", "--kl_beta=0"
    one, two = (toy.train([*flags, f"--num_iterations={n}"])[1] for n in (1, 2))
    assert two["clip_ratio"] == 1 / 8  # of both updates' letters, so 2 of the second one's 8
    e, p = one["help"] + one["helf"], one["help"] + one["halp"]  # q(e) and q(p)
    for sentence in (
        f"q(e) = {e:.3f} and q(p) = {p:.3f}",
        f"`e` of `help` is clipped (ratio {2 * e:.2f}), and the `a` of `halp` ({2 - 2 * e:.2f})",
        f"`p` of `help` has {2 * p:.3f}, a hair below the bound",
        f"q(help) falls from {one['help']:.3f} to {two['help']:.3f}",
    ):
        assert sentence in lesson


@pytest.mark.parametrize("name", READMES)
def test_every_reward_in_python_runs(name):
    """Each reward returns fractions (B,G)."""
    completions = encode("the cat", "tho cyt", "eee zzz", "the cut").view(2, 2, 7)
    mask = encode("__e c_t", "th_ ___") == BLANK
    batch = make_batch(completions[:, 0], mask, 2, (0, 0))
    for language, block in FENCE.findall(READMES[name]):
        if language == "python" and "def " in block and "completions" in block:
            namespace = {}
            exec(textwrap.dedent(block), namespace)
            for function in re.findall(r"def (\w+)", block):
                values = torch.as_tensor(namespace[function](completions, batch))
                assert values.shape == (2, 2) and values.is_floating_point()
