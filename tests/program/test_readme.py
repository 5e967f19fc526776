"""Check the commands, names, links, numbers and rewards in the READMEs."""

import argparse
import importlib
import inspect
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import BLANK, encode, make_batch

from grpo.advantage import compute_advantages
from grpo.experiments import fair
from grpo.run.config import Config, check, read_arguments
from grpo.tools import toy
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


class Understood(Exception):
    """This ends a command as soon as its parser has read the arguments."""


@pytest.mark.parametrize("command", all_commands())
def test_every_command_is_understood(command, monkeypatch):
    """The program's own parser reads it."""
    program, *words = shlex.split(command)
    others = ["-c"], ["-m", "venv"], ["-m", "pytest"], ["-m", "timeit"]
    if program not in ("python", "torchrun") or words[:1] in others or words[:2] in others:
        return
    no_argument = ("...", "-h", "--help")
    words = [x for x in words if not x.startswith("--nproc") and x not in no_argument]
    file = words.pop(0)
    module = words.pop(0) if file == "-m" else file.removesuffix(".py").replace("/", ".")
    settings = {
        "model.pretrain": pretrain.Settings,
        "grpo.tools.toy": Config,
    }
    if module in settings:
        read_arguments(settings[module], words)
        return
    if module == "train_grpo":
        check(Config(**read_arguments(Config, words)))
        return
    if module == "grpo.evaluation":
        module += ".__main__"
    parse = argparse.ArgumentParser.parse_known_args

    def stop_there(parser, argv=None, namespace=None):
        args, unknown = parse(parser, argv, namespace)
        if module == "grpo.experiments.fair":
            return args, unknown  # settings of a run, which it checks
        parser.format_help()  # a lone % in it is an error
        assert not unknown
        raise Understood

    def stop_here(*_):
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop_there)
    monkeypatch.setattr(fair, "write", stop_here)  # it has checked all flags by then
    with pytest.raises(Understood):
        program = importlib.import_module(module)
        program.main(*[words][: len(inspect.signature(program.main).parameters)])


def module_of(name):
    """Import the project's module `name`, for example `loss`. Returns None if there is none."""
    paths = [p for folder in ("grpo", "model", "data") for p in Path(folder).rglob(f"{name}.py")]
    return importlib.import_module(".".join(paths[0].with_suffix("").parts)) if paths else None


def test_every_function_named_exists():
    files = "py|json|jsonl|pt|txt|bin|cu|sh|md|html|png|svg|csv"
    for text in READMES.values():
        text = re.sub(r"^ *```py.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        for first, name in re.findall(r"\b([a-z_]+)\.([A-Za-z_]\w*)\b", text):
            if re.fullmatch(files, name):
                continue
            module = module_of(first)
            # A name with a capital is a class, so its module must be part of the project.
            assert module or not name[0].isupper(), f"{first}.{name}"
            if module:
                assert hasattr(module, name), f"{first}.{name}"


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


def test_every_flag_named_is_one_of_a_program_and_takes_its_value():
    sources = [path for folder in ("grpo", "model", "data") for path in Path(folder).rglob("*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    settings = vars(pretrain.Settings()) | vars(Config())
    for name, text in READMES.items():
        for flag, value in re.findall(r"`--(\w+)(?:=([\w.:,/]+))?`", text):
            assert flag in settings or f'"--{flag}"' in code or flag == "help", (name, flag)
            if flag in vars(Config()) and value and not value.isupper():
                read_arguments(Config, [f"--{flag}={value}"])


def tables(texts):
    """List every table of the texts {name: text}: (name, titles of columns, rows as dicts)."""
    for name, text in texts.items():
        for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
            head, line, *rows = (
                [x.replace("*", "").strip(" `") for x in row[1:-1].split("|")]
                for row in block.split("\n")[:-1]
            )
            assert {*line} == {"---"}, f"{name}: the table at {head} has no head"
            yield name, head, [dict(zip(head, row)) for row in rows]


def test_the_lessons_numbers_are_the_toys():
    """The table has the probabilities of a step, and the text the rewards and the advantages."""
    steps = [{word: round(step[word], 3) for word in toy.WORDS} for step in toy.train()]
    rewards = torch.tensor([[*toy.WORDS.values()]])  # (1,G)
    advantages = compute_advantages(rewards, Config())[0].tolist()
    found = 0
    for _, head, rows in tables(READMES):
        if {*toy.WORDS} <= {*head}:
            for row in rows:
                assert {word: float(row[word].replace("−", "-")) for word in toy.WORDS} in steps, (
                    row
                )
                found += 1
    assert found == 2
    text = " ".join(READMES["grpo/README.md"].split()).replace("−", "-")
    r, A = ([f"{x:.1f}" for x in values] for values in (toy.WORDS.values(), advantages))
    assert f"`help` {r[0]}, `half` {r[1]}, `helf` {r[2]} and `halp` {r[3]}" in text
    assert f"= {A[0]}, and the others have {A[1]}, {A[2]} and {A[3]}" in text


def test_the_lessons_exercise_comes_out_as_its_answers_say(capsys):
    text = READMES["grpo/README.md"]
    (code,) = [block for _, block in FENCE.findall(text) if "SCORES" in block]
    exec(code, {})
    first, *clipped, second = capsys.readouterr().out.splitlines()
    assert first == "update 1: loss 0.00, q(help) 0.46" and second.endswith(" 0.35")
    found = [re.findall(r"(\w) of (\w+) is clipped at ratio (.+)", line)[0] for line in clipped]
    assert found == [("e", "help", "1.54"), ("a", "halp", "0.46")]
    for letter, word, ratio in found:
        assert re.search(rf"`{letter}` of `{word}` (is clipped )?\((ratio )?{ratio}\)", text)


@pytest.mark.parametrize("name", READMES)
def test_every_reward_in_python_runs(name):
    """Each reward returns fractions (B,G)."""
    completions = encode("the cat", "tho cyt", "eee zzz", "the cut").view(2, 2, 7)
    mask = encode("__e c_t", "th_ ___") == BLANK
    batch = make_batch(completions[:, 0], mask, BLANK, 2, (0, 0))
    for language, block in FENCE.findall(READMES[name]):
        if language == "python" and "def " in block and "completions" in block:
            namespace = {}
            exec(textwrap.dedent(block), namespace)
            for function in re.findall(r"def (\w+)", block):
                values = torch.as_tensor(namespace[function](completions, batch))
                assert values.shape == (2, 2) and values.is_floating_point()
