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
from grpo.experiments import fair, gradient, supervised
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
}
SETTINGS = {
    "model.pretrain": pretrain.Settings,
    "grpo.tools.toy": Config,
    "grpo.tools.fill": fill.Settings,
    "grpo.evaluation": evaluation.Settings,
    "grpo.experiments.gradient": gradient.Microscope,
    "grpo.experiments.text": text_experiment.Settings,
}
NO_FLAGS = "venv pytest timeit grpo.one_file grpo.tools.replay grpo.experiments.compare".split()
NO_FLAGS += ["grpo.experiments.grid", "grpo.experiments.figures"]


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


def test_the_lessons_exercise_comes_out_as_its_answers_say(capsys):
    lesson = READMES["grpo/README.md"]
    (code,) = [block for _, block in FENCE.findall(lesson) if "SCORES" in block]
    exec(code, {})
    first, *clipped, second = capsys.readouterr().out.splitlines()
    assert first == "update 1: loss 0.00, q(help) 0.46" and second.endswith(" 0.35")
    found = [re.findall(r"(\w) of (\w+) is clipped at ratio (.+)", line)[0] for line in clipped]
    assert found == [("e", "help", "1.54"), ("a", "halp", "0.46")]
    for letter, word, ratio in found:
        assert re.search(rf"`{letter}` of `{word}` (is clipped )?\((ratio )?{ratio}\)", lesson)


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
    """The network starts from scratch and writes 4 tokens at most after prompts of 2."""
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
        tokens = torch.stack(prompts)  # (N,L)
        completion = torch.zeros(tokens.shape, dtype=torch.bool)
        writes = torch.ones(len(tokens), 1, dtype=torch.bool)
        for _ in range(4):
            drawn = model(tokens)[:, -1].softmax(dim=-1).multinomial(1)  # (N,1)
            tokens = torch.cat([tokens, torch.where(writes, drawn, 0)], dim=1)
            completion = torch.cat([completion, writes], dim=1)
            writes = writes & (drawn != end)
        return tokens, completion

    def score(tokens, completion):
        rewards.append((tokens[:, 2] == tokens[:, 1]) & (tokens[:, 3] == end))
        return rewards[-1]

    torch.manual_seed(0)
    policy, reference = Network(), Network()
    reference.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for _ in range(60):
        prompts = torch.randint(2, 8, (32, 2))
        loss_for_tokens()["token_step"](policy, reference, optimizer, prompts, generate, score)
    assert rewards[0].float().mean() < 0.1
    assert torch.stack(rewards[-10:]).float().mean() > 0.7


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
