"""What the README names exists, its commands run as printed, and what it works out by hand is what the project's own functions give."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import command_line
from test_mistakes import OTHERS, SETTINGS

import train_grpo
from grpo.advantage import advantages
from grpo.loss import grpo_loss, loss_weights
from grpo.plumbing.config import FIELDS, convert, load_config
from grpo.reward import Rewards, load_function
from grpo.stats import stats

ROOT = Path.cwd()
README = Path("README.md").read_text()
TEXT = " ".join(README.split())
FENCED = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line
]
INLINE = re.findall(
    r"`(python3? [^`]+)`",
    " ".join(re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL).split()),
)
TRAINING = sorted(
    {
        match
        for command in FENCED + INLINE
        for match in re.findall(r"python train_grpo\.py (.+)", command)
    }
)

CHEAP = {  # command: what its output must match
    'python -m grpo.fill "the ___ sat on the mat"': r"\Abefore  model/pretrained/generator\.pt\n  probability  judge  drawn\n( +\S+  0\.\d{3}    [1-5]/5  the \[[a-z ]{3}\] sat on the mat\n)+after   out/checkpoint\.pt\n",
    "python -m grpo.compare out out-b": r"\A +out +out-b\nsettings that differ\n  kl_target +0\.65 +0\.5\nthe last step's inputs\n(.*\n)+  gap_closed ",
    "python train_grpo.py --help": r"  --group_size=8 .*completions per input",
    """python -c "from pydoc_data.topics import topics; print(*topics.values(), sep='\\n\\n')" > my.txt""": r"\A\Z",
    "python data/char_diffusion/prepare.py --input=my.txt --out_dir=data/mine": r'"vocabulary": " abcdefghijklmnopqrstuvwxyz_".*"paragraphs": \d{4}, "train_characters": [23]\d{5}, "val_characters": \d{5}}',
    'python -m grpo.fill "the ___ of the class is called" --before=out-mine/generator.pt --judge=out-mine/judge.pt --checkpoint=out-mine-grpo/checkpoint.pt': r"\Abefore  out-mine/generator\.pt\n(.*\n)+after   out-mine-grpo/checkpoint\.pt\n.*\n( .*  the \[[a-z ]{3}\] of the class is called\n)+",
}
COSTLY = {  # part of a command: why it is not run here
    "pip install": "downloads torch; the second of the two is what .ci/run runs in a fresh environment",
    "config/quick.py": "20 seconds; tests/test_train.py runs the same path on tiny models",
    "--kl_target=0.5 --out_dir=out-b": "minutes",
    "config/fooled.py": "minutes",
    "--kl_beta=0 --out_dir=out-free": "minutes",
    "config/long_words.py": "minutes",
    "--alphabet=ascii": "reads the whole standard library; tests/test_data.py prepares this alphabet from a small text",
    "model.pretrain": "minutes to an hour",
    "grpo.bench": "ten minutes; tests/test_bench.py runs its parts on tiny models",
    "--dataset=mine": "minutes",
    "--kl_estimator=k1 --out_dir=out-k1": "minutes, as all exercises",
    "grpo.compare out-long out-k1": "the same as `grpo.compare out out-b`",
}


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    """A reader's folder: the models that ship, and the runs `out` and `out-b`, here of one small step."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "data").mkdir()
    for name in ("model", "config"):
        (folder / name).symlink_to(ROOT / name)
    for name, source in {
        "out-mine/generator.pt": "generator",
        "out-mine/judge.pt": "judge",
        "out-mine-grpo/checkpoint.pt": "generator",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(ROOT / "model" / "pretrained" / f"{source}.pt")
    small = {
        "dataset": world / "text",
        "batch_size": 2,
        "group_size": 2,
        "max_iters": 1,
        "warmup_iters": 0,
        "eval_inputs": 2,
        "num_iterations": 1,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for out_dir, kl_target in ("out", 0.65), ("out-b", 0.5):
            train_grpo.main(
                [
                    "config/grpo_config.py",
                    *command_line(small, out_dir=out_dir, kl_target=kl_target),
                ]
            )
    return folder


def said(text):
    if text not in TEXT:
        pytest.fail(f"the README does not say: {text}")


def run(command, capsys):
    """What a command prints; `main` is called here, but for `python -c`."""
    _, *arguments = shlex.split(command)
    if arguments[0] == "-c":
        return subprocess.run(
            command.replace("python", shlex.quote(sys.executable), 1),
            shell=True,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    module, *arguments = (
        arguments[1:]
        if arguments[0] == "-m"
        else (arguments[0][:-3].replace("/", "."), *arguments[1:])
    )
    importlib.import_module(module).main(arguments)
    return capsys.readouterr().out


def test_every_cheap_command_prints_what_the_readme_says(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for command in dict.fromkeys(FENCED + INLINE):
        if command in CHEAP:
            printed = run(command, capsys)
            assert re.search(CHEAP[command], printed), (command, printed)
    assert (
        json.loads((folder / "data" / "mine" / "meta.json").read_text())["train_characters"]
        > 200_000
    )


def test_every_other_command_is_known_to_be_costly():
    for command in FENCED + INLINE:
        assert (command in CHEAP) + any(part in command for part in COSTLY) == 1, command
    for part in (*CHEAP, *COSTLY):
        assert any(part in command for command in FENCED + INLINE), part


@pytest.mark.parametrize(
    "command",
    TRAINING
    + [
        f"config/grpo_config.py config/long_words.py {flag}"
        for flag in re.findall(r"^\| \d? ?\| `(--.+?)` \|", README, re.MULTILINE)
    ],
)
def test_every_training_command_is_understood(command, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: True)  # a file that another command makes
    load_config([argument for argument in shlex.split(command) if argument not in ("--help", "…")])


def test_what_a_run_leaves_behind_is_explained(folder):
    """Every file by its name, every metric in the glossary, and the glossary has no metric that is not there."""
    section = README[README.index("## Metrics") : README.index("## Trouble")]
    assert {path.name for path in (folder / "out").iterdir()} == set(
        re.findall(r"`out/([\w.]+)`", section)
    )
    explained = set(
        re.findall(
            r"`(\w+)`",
            " ".join(row.split("|")[1] for row in section.splitlines() if row.startswith("| `")),
        )
    )
    written = set(json.loads((folder / "out" / "metrics.jsonl").read_text().splitlines()[-1])) - {
        "iteration",
        "reward_judge",
    }
    assert explained == written


@pytest.mark.parametrize(
    "name",
    sorted(
        set(
            re.findall(r"`((?!test_|torch|cuda)\w+\.\w+)`", README)
            + re.findall(
                r"\b((?:step|sampling|reward|advantage|stats|loss|reference)\.\w+)$",
                README,
                re.MULTILINE,
            )
        )
    ),
)
def test_every_function_named_exists(name):
    module, function = name.split(".")
    if function in ("py", "json", "jsonl", "pt", "txt", "bin", "cu", "png"):
        return
    assert callable(getattr(importlib.import_module(f"grpo.{module}"), function))


def test_every_file_is_named_and_every_file_named_exists():
    named = set(re.findall(r"`((?:grpo|model|data|config|tests)/[\w/]+\.(?:py|cu))`", README))
    assert not [name for name in named if not Path(name).is_file()]
    product = {
        str(path)
        for folder in ("grpo", "model", "data")
        for path in Path(folder).rglob("*.py")
        if path.stem != "__init__"
    }
    assert product <= named


def test_every_link_leads_to_a_heading():
    anchors = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", README)) <= anchors


def test_the_settings_guide_starts_with_the_default_experiment():
    config = load_config(["config/grpo_config.py"])
    rows = re.findall(
        r"^\| (.+?) \|.*\| (.+?) \|$",
        README[README.index("## Settings") : README.index("## Metrics")],
        re.MULTILINE,
    )[1:]
    assert len(rows) >= 10
    for names, start in rows:
        name = re.match(r"`(\w+)`", names).group(1)
        assert convert(name, re.match(r"`?([\w.-]+)", start).group(1), "README") == getattr(
            config, name
        ), name


def test_every_promise_is_a_test():
    promised = re.findall(
        r"`(test_\w+)\.(test_\w+)`",
        README[README.index("## What we promise") : README.index("## What was measured where")],
    )
    assert f"a user's mistake, {len(SETTINGS) + len(OTHERS)} of them" in README
    assert len(promised) > 15 and not [
        name
        for file, name in promised
        if f"def {name}(" not in Path(f"tests/{file}.py").read_text()
    ]


def test_every_flag_of_the_variants_exists():
    """The table's flags are settings, its values are allowed, its functions are there."""
    rows = re.findall(
        r"^\| (.+) \| (.+) \| (.+) \| `(\w+)\.(\w+)`.* \|$",
        README[README.index("## Variants") :],
        re.MULTILINE,
    )
    assert len(rows) > 20
    seen = set()
    for _, _, flags, module, function in rows:
        assert hasattr(importlib.import_module(f"grpo.{module}"), function), (module, function)
        for flag in re.findall(r"`--([^`]+)`", flags):
            name, _, value = flag.partition("=")
            assert name in FIELDS, flag
            if value:
                convert(name, value, flag)
            seen.add(name)
    assert {
        "loss_type",
        "clip_delta",
        "minibatch_size",
        "importance_sampling_level",
        "baseline",
        "scale_rewards",
        "kl_estimator",
        "entropy_coef",
        "top_entropy_quantile",
        "reference_mode",
        "xtc_probability",
        "repetition_penalty",
        "reward",
        "prompts_file",
        "gradient_checkpointing",
        "dtype",
    } <= seen


LETTERS, FILLS = "aefhlp", ("help", "half", "helf", "halp")


def by_hand(logits, reference, rewards, kl_beta=0.0):
    """The project's own step on `h_l_`: -> advantages (4,), the gradient of the logits (1,4,V), KL and entropy of the first blank."""
    logits = logits.clone().requires_grad_()
    y = torch.tensor([[[LETTERS.index(c) for c in fill] for fill in FILLS]])  # (1,4,4)
    mask = torch.tensor([[False, True, False, True]])
    A = advantages(torch.tensor([rewards]))  # (1,4)
    logp, ref_logp, kl, entropy = stats(logits, reference, y, torch.isfinite(logits.detach()), mask)
    loss, _ = grpo_loss(
        logp,
        logp.detach(),
        ref_logp,
        kl,
        entropy,
        A[..., None],
        mask,
        loss_weights(mask, "grpo", 4, inputs=1, blanks=2, micro_batches=1),
        kl_beta,
    )
    return (
        A[0],
        torch.autograd.grad(loss, logits)[0].nan_to_num(),
        kl[0, 1].item(),
        entropy[0, 1].item(),
    )


def test_the_step_by_hand():
    """Every number of the README's two tables, from `advantages`, `stats` and `grpo_loss`."""
    signed = lambda x, digits=2: f"{x:+.{digits}f}".replace("-", "−")
    start = torch.full((1, 4, 6), float("-inf"))
    for t, letters in enumerate(("h", "ae", "l", "fp")):
        start[0, t, [LETTERS.index(c) for c in letters]] = 0
    rewards = [0.9, 0.7, 0.1, 0.1]
    A, gradient, kl, entropy = by_hand(start, start, rewards)
    for fill, reward, a in zip(FILLS, rewards, A.tolist()):
        parts = [a * ((fill[1] == "e") - 0.5), a * ((fill[3] == "p") - 0.5)]
        said(
            f"| `{fill}` | {reward} | {signed(reward - 0.45)} | {signed(a)} | {signed(parts[0])} | {signed(parts[1])} |"
        )
    rise = [-gradient[0, 1, LETTERS.index("e")].item(), -gradient[0, 3, LETTERS.index("p")].item()]
    said("| | | | **" + "** | **".join(signed(x, 3) for x in rise) + "** |")
    said(
        f"The mean of the group is {sum(rewards) / 4:.2f}, its standard deviation {torch.tensor(rewards).std(correction=0):.3f}."
    )
    torch.testing.assert_close(gradient[0, 1, LETTERS.index("a")].item(), rise[0])

    after = start - 10 * gradient
    _, pulled, kl_after, entropy_after = by_hand(after, start, rewards, kl_beta=0.03)
    for name, logits, kl, entropy in (
        ("before", start, "0", entropy),
        ("after one step", after, f"{kl_after:.3f}", entropy_after),
    ):
        q = logits[0].softmax(dim=-1)
        e, p = q[1, LETTERS.index("e")].item(), q[3, LETTERS.index("p")].item()
        assert e == pytest.approx(p)
        P = [e * p, (1 - e) * (1 - p), e * (1 - p), (1 - e) * p]
        expected = sum(x * reward for x, reward in zip(P, rewards))
        said(
            f"| {name} | {e:.3f} | {P[0]:.3f} | {P[1]:.3f} | {P[2] + P[3]:.3f} | {expected:.3f} | {entropy:.3f} | {kl} |"
        )
    free = by_hand(after, start, rewards)[1]
    said(
        f"β = 0.03 takes the next gradient from {-free[0, 1, LETTERS.index('e')]:.4f} to {-pulled[0, 1, LETTERS.index('e')]:.4f}"
    )
    said("(0.8, 0.8, 0.1, 0.1), all gradients would be exactly 0")
    assert not by_hand(start, start, [0.8, 0.8, 0.1, 0.1])[1].any()


def test_the_reward_function_works_as_printed(tmp_path, monkeypatch):
    code = re.search(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL).group(1)
    assert len(code.splitlines()) <= 10
    said("`--reward=judge:1,my_rewards.py:vowels:0.2`")
    monkeypatch.chdir(tmp_path)
    Path("my_rewards.py").write_text(code)
    texts = ["the cat", "tho cyt", "eee zzz", "the cut"]
    letters = sorted(set("".join(texts)))
    completions = torch.tensor([[letters.index(c) for c in text] for text in texts]).view(2, 2, 7)
    mask = torch.tensor([[c == "_" for c in text] for text in ("__e c_t", "th_ ___")])
    decode = lambda tokens: ["".join(letters[t] for t in row) for row in tokens.view(-1, 7)]
    expected = torch.tensor(
        [[1 / 3, 0.0], [1 / 4, 2 / 4]]
    )  # h, t and a; h, t and y; e, zzz; e, cut
    torch.testing.assert_close(
        load_function("my_rewards.py:vowels")(completions, None, mask, decode), expected
    )
    rewards = Rewards(
        lambda rows: torch.zeros(rows.shape), "judge:1,my_rewards.py:vowels:0.2", "".join(letters)
    )
    _, parts = rewards(completions, completions[:, 0], mask, "run")
    torch.testing.assert_close(rewards.total(parts), 0.5 + 0.2 * expected)


def test_the_line_that_breaks_the_sampling_has_its_place():
    """The exercise names a line of `rollout`; below it `completions` and `kept` are there to be spoiled."""
    line = re.search(r"`(completions, kept = [^`]+)`", TEXT).group(1)
    said("`kept = torch.ones_like(kept)`")
    assert Path("grpo/step.py").read_text().count(line) == 1
