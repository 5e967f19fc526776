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


def loss_for_tokens():
    """Run the code of config/README.md. Returns its names."""
    (code,) = [block for _, block in FENCE.findall(READMES["config/README.md"]) if "k3 =" in block]
    namespace = {"torch": torch}
    exec(code, namespace)
    return namespace


def test_the_loss_for_tokens_equals_loops():
    """Two completions of different lengths after a prompt of two tokens, one of them padded."""
    code = loss_for_tokens()
    torch.manual_seed(0)
    tokens = torch.randint(5, (2, 6))
    completion = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0]]).bool()
    logits, old, ref = torch.randn(2, 6, 5), torch.randn(2, 5) - 2, torch.randn(2, 5) - 2
    A, beta, low, high = torch.tensor([1.5, -0.5]), 0.3, 0.2, 0.28
    expected = 0.0
    for i, length in enumerate((4, 2)):
        for t in range(2, 2 + length):
            # the token at t is predicted from the position before it
            now = logits[i, t - 1].log_softmax(dim=-1)[tokens[i, t]]
            ratio, log_r = (now - old[i, t - 1]).exp(), ref[i, t - 1] - now
            objective = min(ratio * A[i], min(max(ratio, 1 - low), 1 + high) * A[i])
            expected += (beta * (log_r.exp() - 1 - log_r) - objective) / length / 2
    now = code["log_probs"](lambda _: logits, tokens)
    loss = code["token_loss"](now, old, ref, completion, A, beta, low, high)
    assert torch.allclose(loss, expected)


def test_the_step_for_tokens_teaches_a_network_to_repeat_a_token_and_stop():
    """The network starts from scratch and writes 4 tokens at most after prompts of 1 to 4."""
    end, rewards = 1, []

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(8, 32)
            self.recur = torch.nn.GRU(32, 32, batch_first=True)
            self.head = torch.nn.Linear(32, 8)

        def forward(self, tokens):
            return self.head(self.recur(self.embed(tokens))[0])  # (N,L,V)

    def generate(model, prompts):
        at = torch.tensor([len(prompt) for prompt in prompts])  # (N,) where the next token goes
        row = torch.arange(len(prompts))
        tokens = torch.zeros(len(prompts), 8, dtype=torch.long)
        completion = torch.zeros(len(prompts), 8, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = prompt
        writes = torch.ones(len(prompts), dtype=torch.bool)
        for _ in range(4):
            drawn = model(tokens)[row, at - 1].softmax(dim=-1).multinomial(1)[:, 0]  # (N,)
            tokens[row, at] = torch.where(writes, drawn, 0)
            completion[row, at] = writes
            writes = writes & (drawn != end)
            at += 1
        return tokens, completion

    def score(tokens, completion):
        first = completion.int().argmax(dim=1)  # (N,)
        row = torch.arange(len(tokens))
        repeats = tokens[row, first] == tokens[row, first - 1]
        rewards.append(repeats & (tokens[row, first + 1] == end))
        return rewards[-1]

    torch.manual_seed(0)
    policy, reference = Network(), Network()
    reference.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for _ in range(60):
        lengths = torch.randint(1, 5, (32,)).tolist()
        prompts = [torch.randint(2, 8, (length,)) for length in lengths]
        loss_for_tokens()["token_step"](policy, reference, optimizer, prompts, generate, score)
    assert rewards[0].float().mean() < 0.1
    assert torch.stack(rewards[-10:]).float().mean() > 0.7


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
