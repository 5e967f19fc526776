"""What the READMEs say is so: commands are understood, names and links exist, sums come out."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

from grpo.advantage import group_advantages
from grpo.logprobs import logprobs
from grpo.loss import grpo_loss
from grpo.plumbing.config import FIELDS, Config, convert, load_config
from grpo.rollout import Rollout
from grpo.sampling import Fills

READMES = {}
for folder in ("", "grpo/", "config/", "model/", "data/", "tests/"):
    READMES[f"{folder}README.md"] = Path(f"{folder}README.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROSE = {name: FENCE.sub("", text) for name, text in READMES.items()}  # without blocks of code


def all_commands():
    """Every command of the READMEs: what && joins in lines of ```sh blocks, and `python ...`."""
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


class Understood(Exception):
    """A parser has read its arguments."""


@pytest.mark.parametrize("command", all_commands())
def test_every_command_is_understood(command, monkeypatch):
    """By the program's own parser."""
    program, *words = shlex.split(command)
    if (
        program not in ("python", "torchrun")
        or words[0] == "-c"
        or words[1:2] in (["venv"], ["pytest"])
    ):
        return
    words = [word for word in words if not word.startswith("--nproc") and word != "..."]
    if words[0] == "train_grpo.py":
        monkeypatch.setattr(Path, "exists", lambda self: True)  # what an earlier command makes
        load_config([word for word in words[1:] if word != "--help"])
        return
    module = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
    if module in ("grpo.tools.toy", "grpo.tools.bench"):  # which take nothing
        assert len(words) == 2
        return
    if module == "grpo.evaluation":
        module += ".__main__"
    parse_args = argparse.ArgumentParser.parse_args

    def stop_there(parser, argv=None, namespace=None):
        parse_args(parser, argv, namespace)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop_there)
    with pytest.raises(Understood):
        importlib.import_module(module).main(words[2:] if words[0] == "-m" else words[1:])


def module_of(name):
    """`loss` or `prepare` -> its module: what a README may name by its last part alone."""
    paths = [p for folder in ("grpo", "model", "data") for p in Path(folder).rglob(f"{name}.py")]
    return importlib.import_module(".".join(paths[0].with_suffix("").parts)) if paths else None


def test_every_function_named_exists():
    files = "py|json|jsonl|pt|txt|bin|cu|sh|md"
    for text in READMES.values():
        for first, name in re.findall(r"\b([a-z_]+)\.([A-Za-z_]\w*)\b", text):
            module = module_of(first)
            if module and not re.fullmatch(files, name):
                assert hasattr(module, name), f"{first}.{name}"


def test_every_file_and_test_named_exists():
    tests = "".join(path.read_text() for path in Path("tests").rglob("test_*.py"))
    for name, text in PROSE.items():
        for path in re.findall(r"`((?:grpo|model|data|config|tests)/[\w/]+\.\w+)`", text):
            assert Path(path).exists() or path.startswith("data/mine"), (name, path)
        for test in re.findall(r"`(test_\w+)`", text):
            assert f"def {test}(" in tests, (name, test)


def anchors(path):
    """What #... may follow a Markdown file: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", READMES)
def test_every_link_leads_somewhere(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", PROSE[name]):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = Path(name).parent / file if file else Path(name)
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_every_flag_named_is_a_setting_and_takes_its_value():
    for name in ("grpo/README.md", "config/README.md"):
        for flag, value in re.findall(r"`--(\w+)=([\w.:,]+)`", READMES[name]):
            assert flag in FIELDS or flag == "eval_seed", flag
            if flag in FIELDS and value != "FILE":
                convert(flag, value, flag)


LETTERS = "aefhlp"
E = LETTERS.index("e")
P = LETTERS.index("p")
MASK = torch.tensor([[False, True, False, True]])  # h_l_
FILLS = ("help", "half", "helf", "halp")


def half_and_half():
    """(1,4,V): a or e, f or p."""
    logits = torch.full((1, 4, len(LETTERS)), float("-inf"))
    for t, letters in enumerate(("h", "ea", "l", "pf")):
        for letter in letters:
            logits[0, t, LETTERS.index(letter)] = 0.0
    return logits


def by_hand(logits, reference, rewards, kl_beta=0.0):
    """The four fills as one group, through the program's own functions.

    -> the advantages (G,), the loss, its gradient (1,4,V), KL and entropy of the first blank
    """
    config = Config(scale_rewards="group", credit="input", group_size=4, kernel="torch")
    logits = logits.clone().requires_grad_()
    y = torch.tensor([[[LETTERS.index(c) for c in fill] for fill in FILLS]])  # (1,G,4)
    fills = Fills(y, logits.detach().isfinite(), MASK)
    advantages = group_advantages(torch.tensor(rewards).view(1, -1, 1), MASK, config)  # (1,G,1)
    now = logprobs(logits, reference, fills, config)
    old = now._replace(logp=now.logp.detach())
    batch = Rollout(None, fills, reference, old, None, advantages)
    loss, _ = grpo_loss(now, batch, batch, kl_beta, config)
    gradient = torch.autograd.grad(loss, logits)[0].nan_to_num()  # (1,4,V)
    return advantages.flatten().tolist(), loss.item(), gradient, now.kl[0, 1], now.entropy[0, 1]


def signed(x, digits=2):
    return f"{x:+.{digits}f}".replace("-", "−")


def says(text):
    assert text in " ".join(READMES["README.md"].split()), text


def test_the_step_by_hand():
    """Every number of the lesson's two tables, from the program's own functions."""
    start = half_and_half()
    rewards = [0.9, 0.7, 0.1, 0.1]
    A, loss, gradient, _, entropy = by_hand(start, start, rewards)
    assert loss == pytest.approx(0, abs=1e-6) and gradient.abs().max() > 0.03
    for fill, reward, a in zip(FILLS, rewards, A):
        first = signed(a * ((fill[1] == "e") - 0.5))
        second = signed(a * ((fill[3] == "p") - 0.5))
        says(
            f"| `{fill}` | {reward} | {signed(reward - 0.45)} | {signed(a)} | {first} | {second} |"
        )
    rise = [signed(-gradient[0, t, v].item(), 3) for t, v in ((1, E), (3, P))]
    says(f"| | | | **{rise[0]}** | **{rise[1]}** |")
    deviation = torch.tensor(rewards).std(correction=0)
    says(f"The mean of the group is 0.45, its standard deviation {deviation:.3f}.")

    after = start - 10 * gradient
    _, _, pulled, kl, entropy_after = by_hand(after, start, rewards, kl_beta=0.03)
    for name, logits, kl_text, h in (
        ("before", start, "0", entropy),
        ("after one step", after, f"{kl.item():.3f}", entropy_after),
    ):
        q = logits.softmax(dim=-1)[0]
        e, p = q[1, E].item(), q[3, P].item()
        words = (e * p, (1 - e) * (1 - p), e * (1 - p) + (1 - e) * p)
        expected = 0.9 * words[0] + 0.7 * words[1] + 0.1 * words[2]
        numbers = " | ".join(f"{x:.3f}" for x in (e, *words, expected, h.item()))
        says(f"| {name} | {numbers} | {kl_text} |")
    free = by_hand(after, start, rewards)[2]
    says(f"β = 0.03 takes the next gradient from {-free[0, 1, E]:.4f} to {-pulled[0, 1, E]:.4f}")
    says("(0.8, 0.8, 0.1, 0.1), all gradients would be exactly 0")
    assert not by_hand(start, start, [0.8, 0.8, 0.1, 0.1])[2].any()


@pytest.mark.parametrize("name", READMES)
def test_every_reward_in_python_runs(name):
    """It returns (B,G) or (B,G,T)."""
    texts = ["the cat", "tho cyt", "eee zzz", "the cut"]
    letters = sorted(set("".join(texts)))
    completions = torch.tensor([[letters.index(c) for c in text] for text in texts]).view(2, 2, 7)
    mask = torch.tensor([[c == "_" for c in text] for text in ("__e c_t", "th_ ___")])

    def decode(tokens):
        return ["".join(letters[t] for t in row) for row in tokens.view(-1, 7)]

    for language, block in FENCE.findall(READMES[name]):
        if language == "python" and "completions" in block:
            namespace = {}
            exec(block, namespace)
            for function in re.findall(r"def (\w+)", block):
                values = namespace[function](completions, completions[:, 0], mask, decode)
                assert torch.as_tensor(values).shape in (completions.shape, completions.shape[:2])
