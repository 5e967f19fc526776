"""What the READMEs say is so: commands are understood, names and links exist, sums come out."""

import argparse
import importlib
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
from grpo.policy import logprobs
from grpo.rollout import Rollout

from grpo.advantage import group_advantages
from grpo.loss import grpo_loss
from grpo.plumbing.config import FIELDS, Config, convert, load_config
from grpo.sampling import Fills
from grpo.tools import toy

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


E, P = map(toy.VOCABULARY.index, "ep")


def by_hand(logits, kl_beta=0.0):
    """The toy's four fills as one group, through the program's own functions.

    -> the advantages (G,), the fall of the loss by the logits (4,V), the KL of the first blank
    """
    config = Config(credit="input", kl_beta=kl_beta)
    logits = logits.clone().requires_grad_()
    start = toy.Table().logits.detach()
    fills = Fills(toy.COMPLETIONS[None], start.isfinite(), toy.MASK)
    rewards = torch.tensor([*toy.WORDS.values()]).view(1, -1, 1)  # (1,G,1)
    advantages = group_advantages(rewards, toy.MASK, config)
    now = logprobs(logits, start, fills, config)
    old = now._replace(logp=now.logp.detach())
    batch = Rollout(None, fills, start, old, None, advantages)
    loss, _ = grpo_loss(now, batch, batch, config)
    gradient = torch.autograd.grad(loss, logits)[0].nan_to_num()  # (1,4,V)
    return advantages.flatten().tolist(), -gradient[0], now.kl[0, 1].item()


def says(text):
    text = text.replace("-", "−")
    assert text in " ".join(READMES["README.md"].split()), text


def test_the_step_by_hand():
    """Every number of the lesson's two tables, from the program's own functions."""
    start = toy.Table().logits.detach()
    A, rise, _ = by_hand(start)
    for (fill, reward), a in zip(toy.WORDS.items(), A):
        first, second = (f"{a * ((letter in fill) - 0.5):+.2f}" for letter in "ep")
        says(f"| `{fill}` | {reward} | {reward - a:.1f} | {a:+.1f} | {first} | {second} |")
    e, p = rise[1, E].item(), rise[3, P].item()
    says(f"| | | 0 | **{e:+.2f}** | **{p:+.2f}** |")
    says(f"move to ±{4 * e:.1f}, those of `p` and `f` to ±{4 * p:.1f}")

    after = start + 4 * rise
    for name, logits in (("before", start), ("after one step", after)):
        q = logits.softmax(dim=-1)[0]
        e, p = q[1, E].item(), q[3, P].item()
        words = [e * p, (1 - e) * (1 - p), e * (1 - p), (1 - e) * p]
        expected = sum(chance * r for chance, r in zip(words, toy.WORDS.values()))
        says(f"| {name} | " + " | ".join(f"{x:.3f}" for x in (e, p, *words, expected)) + " |")
    (_, free, kl), (_, pulled, _) = by_hand(after), by_hand(after, kl_beta=0.4)
    ratio = math.log(e / 0.5)
    says(f"for `e` {e:.3f} · ({ratio:.3f} - {kl:.3f}) = {e * (ratio - kl):.3f}")
    for letter, t, v in (("they take ", 1, E), ("and ", 3, P)):
        says(f"{letter}{free[t, v]:.2f} to {pulled[t, v]:.3f}")
    says(f"after a hundred `help` has {toy.train(100)['help']:.3f}")


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
