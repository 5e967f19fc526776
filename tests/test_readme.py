"""What the READMEs name exists, their commands run, their sums are what the program gives.

README.md is the lesson; grpo/, config/, model/, data/ and tests/ have one each, to look things up.
"""

import argparse
import ast
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import command_line
from test_mistakes import OTHERS, SETTINGS

import train_grpo
from grpo.advantage import group_advantages
from grpo.loss import count, grpo_loss, loss_weights
from grpo.plumbing.config import FIELDS, Config, convert, load_config
from grpo.reward import Rewards
from grpo.stats import marginal_kl, stats

ROOT = Path.cwd()
LESSON = "README.md"
FOLDERS = ("grpo", "config", "model", "data", "tests")
READMES = {}
for name in [LESSON, *(f"{folder}/README.md" for folder in FOLDERS)]:
    READMES[name] = Path(name).read_text()

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROSE = {name: FENCE.sub("", text) for name, text in READMES.items()}  # without blocks of code
FILES = ("py", "json", "jsonl", "pt", "txt", "bin", "cu", "h", "sh", "md", "png", "svg")

# What runs here, and what it must print; whatever else is named is read by its own parser alone.
CHEAP = {
    r"python -c .+": r"\A\Z",
    r"python train_grpo\.py --help": r"  --group_size=16 .*completions per input",
    r"python data/char_diffusion/prepare\.py --input=\S+ --out_dir=\S+": (
        r'"vocabulary": " abcdefghijklmnopqrstuvwxyz_".*'
        r'"paragraphs": \d{4}, "train_characters": [23]\d{5}, "val_characters": \d{5}}'
    ),
    r"python -m grpo\.fill [^|]+": (
        r"before  \S+\.pt\n +probability +judge +drawn.*\n(  .*\[.*\].*\n)+after   \S+\.pt\n"
    ),
    r"python -m grpo\.compare [^|-]\S*( out\S*)+": r"settings that differ\n(.*\n)+  gap_closed ",
}


def section(name, title):
    """The lines of a README from the heading that begins so to the next one of its rank."""
    start = re.search(rf"^(#+) {re.escape(title)}.*$", READMES[name], re.MULTILINE)
    if not start:
        pytest.fail(f"{name} has no heading {title!r}")
    rest = READMES[name][start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", FENCE.sub(blank_out, rest), re.MULTILINE)
    return rest[: end.start()] if end else rest


def blank_out(match):
    """A block of code, as many characters that are no heading."""
    return re.sub(r"[^\n]", ".", match[0])


def table_rows(text):
    """The cells of every line of every table."""
    rows = re.findall(r"^\| ?(.*?) ?\|$", text, re.MULTILINE)
    return [re.split(r" ?\| ?", row) for row in rows]


def all_commands():
    """Every command of the READMEs: what && joins in lines of ```sh blocks, and `python ...`."""
    found = []
    for name, text in READMES.items():
        for language, block in FENCE.findall(text):
            if language == "sh":
                for line in filter(None, block.splitlines()):
                    found += line.split(" && ")
        found += re.findall(
            r"`((?:\w+=\w+ )?(?:python3?|torchrun|bash) [^`]+)`", " ".join(PROSE[name].split())
        )
    return list(dict.fromkeys(found))


COMMANDS = all_commands()


def said(text):
    """The lesson holds these words."""
    if text not in " ".join(READMES[LESSON].split()):
        pytest.fail(f"{LESSON} does not say: {text}")


@pytest.mark.parametrize("name", READMES)
def test_each_is_short_enough_to_be_read(name):
    lines = READMES[name].splitlines()
    assert len(lines) <= (220 if name == LESSON else 250)
    assert name != LESSON or len(READMES[name].split()) <= 3000
    wide = [line for line in PROSE[name].splitlines() if len(line) > 120]
    assert not [line for line in wide if not line.startswith(("|", "<"))]


class Understood(Exception):
    """A parser has read its arguments."""


def understand(command, monkeypatch):
    """Raises what the program's own parser raises for what it does not know."""
    words = shlex.split(command)
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    program, *words = words
    if program == "torchrun":
        program = "python"
        words = [word for word in words if not word.startswith("--nproc_per_node=")]
    if program in (".", "pip"):
        return
    if program == "bash":
        assert Path(words[0]).is_file(), words[0]
        return
    assert program in ("python", "python3"), command

    if words[0] == "-c":
        ast.parse(words[1])
        return
    if words[:2] in (["-m", "venv"], ["-m", "pytest"]):
        paths = [word for word in words[2:] if word.startswith("tests")]
        assert all(Path(path).exists() for path in paths), paths
        return
    if words[0] == "train_grpo.py":
        monkeypatch.setattr(Path, "exists", lambda self: True)  # a file that a command makes
        load_config([word for word in words[1:] if word not in ("--help", "…")])
        return

    module, arguments = program_of(words)
    if words[:2] == ["-m", "grpo.group"]:  # it takes settings, as train_grpo.py does
        load_config([word for word in arguments if not word.startswith("--plot=")])
        return
    parse_args = argparse.ArgumentParser.parse_args

    def stop_there(parser, argv=None, namespace=None):
        parse_args(parser, argv, namespace)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop_there)
    with pytest.raises(Understood):
        module.main(arguments)


def program_of(words):
    """["-m", "grpo.fill", ...] or ["data/.../prepare.py", ...] -> the module, its arguments."""
    if words[0] == "-m":
        return importlib.import_module(words[1]), words[2:]
    return importlib.import_module(words[0].removesuffix(".py").replace("/", ".")), words[1:]


EXERCISES = [row[1] for row in table_rows(section("config/README.md", "Exercises"))]
EXERCISES = [cell.strip("`") for cell in EXERCISES if cell.startswith("`--")]


@pytest.mark.parametrize(
    "command",
    COMMANDS
    + [
        f"python train_grpo.py config/grpo_config.py config/long_words.py {flag}"
        for flag in EXERCISES
    ],
)
def test_every_command_is_understood(command, monkeypatch):
    understand(command, monkeypatch)


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    """A reader's folder: the models that ship, and `out` and `out-b`, runs of one small step."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "data").mkdir()
    for name in ("model", "config"):
        (folder / name).symlink_to(ROOT / name)
    small = {
        "dataset": world / "text",
        "batch_size": 2,
        "group_size": 2,
        "max_iters": 1,
        "warmup_iters": 0,
        "eval_inputs": 2,
        "num_iterations": 1,
        "device": "cpu",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for out_dir, kl_target in (("out", 0.65), ("out-b", 0.5)):
            flags = command_line(small, out_dir=out_dir, kl_target=kl_target)
            train_grpo.main(["config/grpo_config.py", *flags])
    return folder


def make_what_it_reads(command, folder):
    """The models and runs that a command names, where they are not there: shipped ones, copies."""
    for path in re.findall(r"out[\w-]*/\w+\.pt", command):
        kind = "judge" if "judge" in path else "generator"
        if not (folder / path).exists():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).symlink_to(ROOT / "model" / "pretrained" / f"{kind}.pt")
    for run in re.findall(r" (out[\w-]*)(?= |$)", command):
        if not (folder / run).exists():
            shutil.copytree(folder / "out-b", folder / run)


def output(command, capsys):
    """What a command prints; `main` is called here, but for `python -c`."""
    _, *words = shlex.split(command)
    if words[0] == "-c":
        here = command.replace("python", shlex.quote(sys.executable), 1)
        ran = subprocess.run(here, shell=True, check=True, capture_output=True, text=True)
        return ran.stdout
    module, arguments = program_of(words)
    module.main(arguments)
    return capsys.readouterr().out


def test_every_cheap_command_prints_what_it_should(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    ran = set()
    for command in sorted(COMMANDS, key=lambda command: " -c " not in command):  # a text first
        for pattern, printed in CHEAP.items():
            if re.fullmatch(pattern, command):
                make_what_it_reads(command, folder)
                assert re.search(printed, output(command, capsys)), command
                ran.add(pattern)
    assert ran == set(CHEAP)
    meta = json.loads((folder / "data" / "mine" / "meta.json").read_text())
    assert meta["train_characters"] > 200_000


def explained(name, title, file):
    """The names in the first column of the tables below a heading."""
    cells = [row[0] for row in table_rows(section(file, title))]
    return {found for cell in cells for found in re.findall(name, cell)}


def test_what_a_run_leaves_behind_is_explained(folder):
    """Every file, every metric, every row and column by its name, and nothing that is not there."""
    text = section("grpo/README.md", "Metrics")
    files = {path.name for path in (folder / "out").iterdir()}
    assert set(re.findall(r"`out/([\w.]+)`", text)) == files

    line = json.loads((folder / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    evaluation = json.loads((folder / "out" / "evaluation.json").read_text())
    names = set(line) | set(evaluation)
    for row in evaluation.values():
        if isinstance(row, dict) and "judge" in row:
            names |= set(row)
    names -= {"iteration", "reward_judge", "before", "after"}
    names = {name for name in names if not name.startswith("reward_")}

    told = set(re.findall(r"`([a-z][\w@]*)`", text)) | set(re.findall(r"gap_closed", text))
    assert names <= told, names - told
    in_tables = explained(r"`([a-z][\w@]*)`", "Metrics", "grpo/README.md")
    assert in_tables <= names, in_tables - names


def known_modules():
    """{name: module} of what a README may name by its module alone."""
    modules = {"train_grpo": train_grpo, "torch": torch}
    for path in [
        *Path("grpo").rglob("*.py"),
        *Path("model").glob("*.py"),
        *Path("data").glob("*.py"),
    ]:
        if path.stem != "__init__":
            name = ".".join(path.with_suffix("").parts)
            modules[path.stem] = importlib.import_module(name)
    return modules


MODULES = known_modules()


def all_names():
    """`module.name` in the text, and module.name in blocks of plain text."""
    found = set()
    for name, text in READMES.items():
        found |= set(re.findall(r"`([a-zA-Z_]\w*(?:\.[a-zA-Z_]\w*)+)`", PROSE[name]))
        for language, block in FENCE.findall(text):
            if not language:
                names = re.findall(r"\b([a-z_]+)\.([A-Za-z_]\w*)", block)
                found |= {f"{a}.{b}" for a, b in names if a in MODULES}
    return sorted(name for name in found if name.rpartition(".")[2] not in FILES)


@pytest.mark.parametrize("name", all_names())
def test_every_name_exists(name):
    first, *rest = name.split(".")
    if first == "cuda":  # its bindings are where a GPU is
        return
    if first not in MODULES:  # a module by its full name
        importlib.import_module(name)
        return
    thing = MODULES[first]
    for part in rest:
        thing = getattr(thing, part)


def test_every_file_is_named_and_every_file_named_exists():
    text = "".join(READMES.values())
    kinds = "py|cu|h|sh|pt"
    named = set(re.findall(rf"`((?:grpo|model|data|config|tests)/[\w/]+\.(?:{kinds}))`", text))
    assert not [name for name in named if not Path(name).is_file()]
    product = {
        str(path)
        for folder in ("grpo", "model", "data", "config")
        for path in Path(folder).rglob("*.py")
        if path.stem != "__init__"
    }
    assert product <= named, product - named


def anchors(path):
    """What #... may follow a Markdown file: its headings, as GitHub writes them."""
    text = FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", READMES)
def test_every_link_leads_somewhere(name):
    links = re.findall(r"\]\(([^)\s]+)\)", PROSE[name])
    links += re.findall(r'(?:src|srcset|href)="([^"]+)"', PROSE[name])
    for link in links:
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = Path(name).parent / file if file else Path(name)
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        assert target.suffix not in (".png", ".svg") or target.stat().st_size < 200_000, link


def test_every_readme_is_linked_to():
    for folder in FOLDERS:
        assert f"({folder}/README.md" in READMES[LESSON], folder


def test_every_test_named_exists():
    named = {
        pair
        for text in READMES.values()
        for pair in re.findall(r"`(test_\w+)\.py::(test_\w+)`", text)
    }
    assert len(named) > 40
    for file, test in named:
        assert f"def {test}(" in Path(f"tests/{file}.py").read_text(), (file, test)


def test_every_promise_and_every_fault_has_its_test():
    for file, title in (
        ("tests/README.md", "What we promise"),
        ("grpo/README.md", "Faults that others shipped"),
    ):
        rows = table_rows(section(file, title))[2:]
        assert len(rows) > 12
        assert not [row for row in rows if not re.search(r"`test_\w+\.py::test_\w+`", row[-1])]
    mistakes = len(SETTINGS) + len(OTHERS)
    assert f"a user's mistake, {mistakes} of them" in READMES["tests/README.md"]


def test_the_settings_guide_starts_with_the_default_experiment():
    config = load_config(["config/grpo_config.py"])
    rows = table_rows(section("config/README.md", "Settings"))[2:]
    assert len(rows) >= 10
    for names, *_, start in rows:
        name = re.match(r"`(\w+)`", names)[1]
        value = re.match(r"`?([\w.-]+)", start)[1]
        assert convert(name, value, "README") == getattr(config, name), name


def test_every_flag_of_the_variants_exists():
    """The table's flags are settings, its values are allowed; `test_every_name_exists` the rest."""
    rows = table_rows(section("grpo/README.md", "Variants"))[2:]
    assert len(rows) > 20
    seen = set()
    for row in rows:
        assert len(row) == 4 and re.search(r"`\w+\.\w+`", row[3]), row
        for flag in re.findall(r"`--([^`]+)`", row[2]):
            name, _, value = flag.partition("=")
            assert name in FIELDS, flag
            if value:
                convert(name, value, flag)
            seen.add(name)
    assert seen >= {
        "loss_type",
        "clip_delta",
        "minibatch_size",
        "importance_sampling_level",
        "baseline",
        "scale_rewards",
        "kl_estimator",
        "kl_of",
        "entropy_coef",
        "top_entropy_quantile",
        "reference_mode",
        "xtc_probability",
        "repetition_penalty",
        "reward",
        "prompts_file",
        "gradient_checkpointing",
        "dtype",
    }


LETTERS = "aefhlp"
E = LETTERS.index("e")
P = LETTERS.index("p")
MASK = torch.tensor([[False, True, False, True]])  # h_l_


def table_of_logits(*probabilities):
    """(K,4,V): on each side of the coin P(e) = P(p) = its probability, the rest is a's and f's."""
    logits = torch.full((len(probabilities), 4, len(LETTERS)), float("-inf"))  # (K,4,V)
    for z, q in enumerate(probabilities):
        for t, letters in enumerate(("h", "ea", "l", "pf")):
            for letter, share in zip(letters, (q, 1 - q)):
                logits[z, t, LETTERS.index(letter)] = torch.tensor(share).log()
    return logits


def by_hand(logits, reference, fills, rewards, kl_beta=0.0):
    """One group through the program's own functions: `fills` has a list for each side of the coin.

    logits, reference (K,4,V) -> the advantages (G,), the loss, the gradient of the logits (K,4,V),
    and KL and entropy of the first blank on each side (K,).
    """
    config = Config(scale_rewards="group", credit="input")
    K = len(logits)
    logits = logits.clone().requires_grad_()
    y = [[[LETTERS.index(c) for c in fill] for fill in side] for side in fills]
    y = torch.tensor(y)  # (K,g,4)
    mask = MASK.expand(K, 4)
    advantages = group_advantages(torch.tensor(rewards).view(1, -1, 1), MASK, config)  # (1,G,1)
    now = stats(logits, reference, y, torch.isfinite(logits.detach()), mask)
    batch = SimpleNamespace(
        mask=mask,
        old_logp=now.logp.detach(),
        advantages=advantages.view(K, -1, 1),
        learning=mask,
    )
    weights = loss_weights(mask, "grpo", y.shape[1], count(mask, 1))  # (K,4)
    loss, _ = grpo_loss(now, batch, weights, kl_beta, config)
    gradient = torch.autograd.grad(loss, logits)[0].nan_to_num()  # (K,4,V)
    return advantages.flatten(), loss.item(), gradient, now.kl[:, 1], now.entropy[:, 1]


def chances(logits):
    """P(e), P(p) on each side of the coin, and the probability of each word under the mixture."""
    q = logits.softmax(dim=-1)  # (K,4,V)
    e = q[:, 1, E]
    p = q[:, 3, P]
    words = {
        "help": (e * p).mean().item(),
        "half": ((1 - e) * (1 - p)).mean().item(),
        "others": (e * (1 - p) + (1 - e) * p).mean().item(),
    }
    return e.tolist(), p.tolist(), words


def signed(x, digits=2):
    return f"{x:+.{digits}f}".replace("-", "−")


FILLS = ("help", "half", "helf", "halp")


def test_the_step_by_hand():
    """Every number of the lesson's two tables, from `group_advantages`, `stats`, `grpo_loss`."""
    start = table_of_logits(0.5)
    rewards = [0.9, 0.7, 0.1, 0.1]
    A, loss, gradient, kl, entropy = by_hand(start, start, [FILLS], rewards)
    assert loss == pytest.approx(0, abs=1e-6) and gradient.abs().max() > 0.03
    for fill, reward, a in zip(FILLS, rewards, A.tolist()):
        first = signed(a * ((fill[1] == "e") - 0.5))
        second = signed(a * ((fill[3] == "p") - 0.5))
        said(
            f"| `{fill}` | {reward} | {signed(reward - 0.45)} | {signed(a)} | {first} | {second} |"
        )
    rise = -gradient[0, 1, E].item()
    assert rise == pytest.approx(-gradient[0, 3, P].item())
    assert rise == pytest.approx(gradient[0, 1, LETTERS.index("a")].item())
    said(f"| | | | **{signed(rise, 3)}** | **{signed(rise, 3)}** |")
    deviation = torch.tensor(rewards).std(correction=0)
    said(
        f"The mean of the group is {sum(rewards) / 4:.2f}, its standard deviation {deviation:.3f}."
    )

    after = start - 10 * gradient
    _, _, pulled, kl_after, entropy_after = by_hand(after, start, [FILLS], rewards, kl_beta=0.03)
    for name, logits, kl_text, h in (
        ("before", start, "0", entropy),
        ("after one step", after, f"{kl_after.item():.3f}", entropy_after),
    ):
        e, p, words = chances(logits)
        assert e == pytest.approx(p)
        expected = 0.9 * words["help"] + 0.7 * words["half"] + 0.1 * words["others"]
        numbers = (e[0], *words.values(), expected, h.item())
        said(f"| {name} | " + " | ".join(f"{x:.3f}" for x in numbers) + f" | {kl_text} |")
    free = by_hand(after, start, [FILLS], rewards)[2]
    said(f"β = 0.03 takes the next gradient from {-free[0, 1, E]:.4f} to {-pulled[0, 1, E]:.4f}")
    said("(0.8, 0.8, 0.1, 0.1), all gradients would be exactly 0")
    assert not by_hand(start, start, [FILLS], [0.8, 0.8, 0.1, 0.1])[2].any()


def test_the_coin_by_hand():
    """Two sides that lean a little: each takes the word it leans to, and both words stay.

    18 fills as often as they are likely: heads (⅔ e, ⅔ p) 4 help, 1 half, 2 helf, 2 halp, tails
    (⅓, ⅓) the other way round. The judge likes both words equally.
    """
    start = table_of_logits(2 / 3, 1 / 3)
    heads = ["help"] * 4 + ["half"] + ["helf"] * 2 + ["halp"] * 2
    tails = ["help"] + ["half"] * 4 + ["helf"] * 2 + ["halp"] * 2
    rewards = [0.8 if fill in ("help", "half") else 0.1 for fill in heads + tails]
    A, loss, gradient, _, _ = by_hand(start, start, [heads, tails], rewards)
    assert loss == pytest.approx(0, abs=1e-6)
    mean = sum(rewards) / len(rewards)
    deviation = torch.tensor(rewards).std(correction=0)
    said(f"The mean of the group is {mean:.3f}, its standard deviation {deviation:.3f}")
    said(f"`help` and `half` (0.8) have A = {signed(A[0].item())}")
    said(f"`helf` and `halp` (0.1) A = {signed(A[-1].item())}")
    rise = -gradient[:, 1, E]
    torch.testing.assert_close(rise[0], -rise[1])
    said(f"{signed(rise[0].item(), 3)} on heads and {signed(rise[1].item(), 3)} on tails")

    after = start - 10 * gradient
    for name, logits in (("before", start), ("after one step", after)):
        e, p, words = chances(logits)
        assert e == pytest.approx(p)
        expected = 0.8 * (words["help"] + words["half"]) + 0.1 * words["others"]
        together = sum(e) / 2
        assert together == pytest.approx(0.5)
        numbers = (*e, *words.values(), expected, together)
        said(f"| {name} | " + " | ".join(f"{x:.3f}" for x in numbers) + " |")
    mask = MASK.expand(2, 4)
    assert marginal_kl(after, start, mask, 2, 1.0).abs().max() < 1e-6
    of_a_side = by_hand(after, start, [heads, tails], rewards)[3]  # (K,)
    said(f"each side's own KL is {of_a_side[0]:.3f}")


def reward_functions(namespace):
    return [f for f in namespace.values() if getattr(f, "__name__", "") and takes_completions(f)]


def takes_completions(function):
    code = getattr(function, "__code__", None)
    return code is not None and code.co_varnames[:1] == ("completions",)


def test_every_block_of_python_runs(folder, monkeypatch, capsys):
    """A reward in at most ten lines that returns (B,G) or (B,G,T), or a program of the reader's."""
    monkeypatch.chdir(folder)
    texts = ["the cat", "tho cyt", "eee zzz", "the cut"]
    letters = sorted(set("".join(texts)))
    completions = torch.tensor([[letters.index(c) for c in text] for text in texts]).view(2, 2, 7)
    mask = torch.tensor([[c == "_" for c in text] for text in ("__e c_t", "th_ ___")])

    def decode(tokens):
        return ["".join(letters[t] for t in row) for row in tokens.view(-1, 7)]

    rewards = 0
    for text in READMES.values():
        for language, block in FENCE.findall(text):
            if language == "python":
                namespace = {}
                exec(block, namespace)
                for function in reward_functions(namespace):
                    assert len(block.splitlines()) <= 10
                    values = torch.as_tensor(function(completions, completions[:, 0], mask, decode))
                    assert values.shape in (completions.shape, completions.shape[:2])
                    rewards += 1
    assert rewards


def test_the_reward_of_the_exercises(tmp_path, monkeypatch):
    (code,) = [
        block
        for language, block in FENCE.findall(READMES["config/README.md"])
        if language == "python"
    ]
    monkeypatch.chdir(tmp_path)
    Path("my_rewards.py").write_text(code)
    vocabulary = " acehotuyz_"
    texts = ["the cat", "tho cyt", "eee zzz", "the cut"]
    tokens = [[vocabulary.index(c) for c in text] for text in texts]
    completions = torch.tensor(tokens).view(2, 2, 7)
    mask = torch.tensor([[c == "_" for c in text] for text in ("__e c_t", "th_ ___")])
    # Of the blanks h, t, a one is a vowel; of h, t, y none; of e and zzz one, of e and cut two.
    expected = torch.tensor([[1 / 3, 0.0], [1 / 4, 2 / 4]])

    def undecided(rows):
        return torch.zeros(rows.shape)  # logits: P(real) is a half

    config = Config(reward="judge:1,my_rewards.py:vowels:0.2")
    rewards = Rewards(undecided, config, vocabulary, set(), torch.device("cpu"))
    _, parts = rewards(completions, completions[:, 0], mask, "run")
    torch.testing.assert_close(rewards.total(parts), 0.5 + 0.2 * expected)


def test_the_line_that_breaks_the_sampling_has_its_place():
    """The exercise names a line; below it `completions` and `kept` are there to be spoiled."""
    text = " ".join(READMES["config/README.md"].split())
    line = re.search(r"`(completions, kept = [^`]+)`", text)[1]
    assert "`kept = torch.ones_like(kept)`" in text
    assert Path("train_grpo.py").read_text().count(line) == 1
