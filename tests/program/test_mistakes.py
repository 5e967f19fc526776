"""Check that a user's mistake ends a run with exit code 2 before anything is written.

One line on stderr says what is wrong, what is allowed and how to fix it.
"""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import command_line, run

import train_grpo
from grpo.plumbing import checkpoint, load
from grpo.plumbing.checkpoint import model_file, read, write
from grpo.plumbing.config import load_config
from model.transformer import Generator, TransformerConfig

# A key holds arguments that we add to those of a run that works. Its value is part of the line that
# stderr then shows. {x} is the folder `bad`, and {w} is the folder `world`.
MISTAKES = {
    # flags
    "--grup_size=8": "there is no setting 'grup_size'; did you mean 'group_size'?",
    "--banana=1": "there is no setting 'banana'; --help lists the settings",
    "--group_size": "--group_size has no value; write it in one piece, --group_size=VALUE",
    "--group_size 8": "--group_size has no value; write it in one piece, --group_size=VALUE",
    "--group_size=8.5": "group_size='8.5' is not allowed; group_size takes a whole number from 2",
    "--batch_size=0": "batch_size takes a whole number from 1 to",
    "--temperature=nan": "temperature takes a number from 0.001 to 100",
    "--judge_score=odds": "judge_score takes log_odds or probability",
    "--loss_type=ppo": "loss_type takes grpo or dapo or bnpo or dr_grpo or sum",
    "--wandb_log=maybe": "wandb_log takes true or false",
    "--masking=words": "random, span, word, short, sticky",
    "--masking=word:-1": "WEIGHT is more than 0",
    "--top_p=1.5": "top_p takes a number from 1e-09 to 1",
    "--dtype=float16": "dtype takes auto or float32 or bfloat16",
    "--beta1=1": "beta1 takes a number from 0 to 0.999999999",
    "--device=banana": "device banana is not on this machine; it has cpu",
    "--kernel=cuda": "kernel",
    "--reward=jugde": "is not allowed; write NAME or NAME:WEIGHT, with each NAME only once",
    "--reward=judge:1e999": "has a part 'judge:1e999' that is not allowed",
    "--reward=judge,{x}/r.py:judge": "the name judge is taken; rename the function or the file",
    "--reward={x}/r.py:no": "r.py has no function no; write def no(completions, masked, mask, dec",
    "--reward={x}/r.py:flat": "returned the shape (2,); it must be (B, G) = (2, 3) or (B, G, T) =",
    "--reward={x}/r.py:not_finite": "returned 96 numbers that are NaN or infinite; give finite",
    # an empty out_dir, and flags that do not go together
    "--out_dir=": "out_dir is empty; write for example --out_dir=out",
    "--importance_sampling_level=none --num_iterations=2": "set num_iterations=1",
    "--objective=sapo --importance_sampling_level=sequence": "needs the ratio of each letter",
    "--block_size=17": "block_size=17 is more than the 16 characters that the gener",
    # config files
    "group_size=8": "config file group_size=8 does not exist; name another file, or write a",
    "{x}/slip.py": "there is no setting 'grup_size'; did you mean 'group_size'?",
    "{x}/import.py": "there is no setting 'math'; --help lists the settings; in a config",
    "{x}/bare.py": "batch_size has no value; write batch_size = VALUE",
    "{x}/nothing.py": "sets nothing; write for example group_size = 8",
    "{x}/type.py": "group_size=True is not allowed",
    "{x}/none.py": "out_dir=None is not allowed",
    # checkpoints
    "--judge_checkpoint={x}/no.pt": "judge_checkpoint: there is no file",
    "--reward={x}/no.pt": "reward: there is no file",
    "--reward={x}/no.py:f": "reward: there is no file",
    "--judge_checkpoint={x}/cut.pt": "cut.pt is damaged, or no checkpoint; make it again",
    "--judge_checkpoint={x}/slip.py": "slip.py is damaged, or no checkpoint",
    "--judge_checkpoint={w}/generator.pt": "holds a generator, but a judge is needed; name a",
    "--generator_checkpoint={x}/digits.pt": "has the vocabulary '01_', but ' abc",
    "--generator_checkpoint={x}/wider.pt": "torch.Size([3, 3]) from checkpoint, the shape",
    "--reference_checkpoint={w}/latent.pt": "the generator has n_latent=1, but the reference",
    "--out_dir={x}/no --init_from=resume": "no/checkpoint.pt is missing; make it again",
    "--out_dir={x}/model --init_from=resume": "was not written by train_grpo.py; name the out_dir",
    # files that a new run in the same folder would move aside
    "--out_dir={x} --generator_checkpoint={x}/wider.pt": "wider.pt lies in out_dir, and a new",
    "--out_dir={x} --judge_checkpoint={x}/cut.pt": "judge_checkpoint: {x}/cut.pt lies in out_dir",
    "--out_dir={x} --reward={x}/r.py:f": "reward: {x}/r.py lies in out_dir",
    "--out_dir={x} --prompts_file={x}/full.json": "prompts_file: {x}/full.json lies in out_dir",
    "--out_dir={w}": "dataset: {w}/text lies in out_dir",
    # texts, prompts, folders
    "--dataset={x}/no": "there is no dataset in",
    "--prompts_file={x}/no.json": "prompts_file: there is no file",
    "--prompts_file={x}/full.json": "'b' has no blank; write",
    "--out_dir={x}/slip.py": "slip.py is in use by another run, or cannot be written (File exists)",
}  # fmt: skip

CONFIGS = {
    "slip": "grup_size = 8",
    "import": "import math\ngroup_size = 8",
    "bare": "group_size = 8\nbatch_size: 16",
    "nothing": "# group_size = 8",
    "type": "group_size = True",
    "none": "out_dir = None",
}
REWARDS = """
def broken(completions, masked, mask, decode):
    return helper()

def helper():
    return nowhere

def leaves(completions, masked, mask, decode):
    quit()

def flat(completions, masked, mask, decode):
    return completions[:, 0, 0]

def not_finite(completions, masked, mask, decode):
    return completions / 0.0

judge = broken
"""
GRADIENT = """
import torch

def slope(completions, masked, mask, decode):
    x = completions.float().requires_grad_()
    (gradient,) = torch.autograd.grad((2 * x).sum(), x)
    return gradient[..., 0] + 0 * x[..., 0]
"""
# Each key is a file that fails when it runs. Its value has a part of the traceback, and a part of
# the last line.
ERRORS = {
    "group_size = 1 / 0": ("group_size = 1 / 0", "does not run (ZeroDivisionError: division by ze"),
    "import sys; sys.exit()": ("import sys; sys.exit()", "does not run (SystemExit: ); fix it"),
    "group_size = = 8": ("SyntaxError", "does not run (SyntaxError: invalid syntax"),
}


@pytest.fixture(scope="module")
def bad(world, tmp_path_factory):
    """Make a folder of configs, prompts, rewards and checkpoints that a run must refuse."""
    x = tmp_path_factory.mktemp("bad")
    for name, text in CONFIGS.items():
        (x / f"{name}.py").write_text(text)
    (x / "r.py").write_text(REWARDS)
    (x / "full.json").write_text(json.dumps({"prompts": ["a_", "b"]}))
    (x / "cut.pt").write_bytes((world / "judge.pt").read_bytes()[:9000])
    write(x / "digits.pt", model_file(Generator(TransformerConfig(3, 16, 1, 1, 32)), "01_"))
    wider = read(world / "generator.pt")
    wider["weights"]["head.weight"] = torch.zeros(3, 3)
    write(x / "wider.pt", wider)
    (x / "model").mkdir()
    shutil.copy(world / "generator.pt", x / "model" / "checkpoint.pt")
    return x


def listing(*folders):
    return [(p, p.stat().st_mtime_ns) for folder in folders for p in Path(folder).rglob("*")]


def refused(capsys, arguments):
    """Start a run that must be refused: -> stderr, whose last line names the mistake."""
    with pytest.raises(SystemExit) as end:
        train_grpo.main(arguments)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("train_grpo.py: ")
    return err


@pytest.mark.parametrize("arguments, line", MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    flags, bad, world, tmp_path, capsys, arguments, line
):
    given = arguments.format(x=bad, w=world).split()
    before = listing(bad, world, tmp_path)
    err = refused(capsys, command_line(flags) + given)
    assert line.format(x=bad, w=world) in err
    assert err.count("\n") == 1
    assert listing(bad, world, tmp_path) == before


@pytest.mark.parametrize(
    "name, frames, line",
    [
        ("broken", ["return helper()", "return nowhere", "NameError"], "reward broken failed: Na"),
        ("leaves", ["quit()"], "reward leaves failed: SystemExit"),
    ],
)
def test_a_mistake_in_a_reward_shows_all_frames_of_its_file(flags, bad, capsys, name, frames, line):
    """It is found at the start, on a few held-out inputs."""
    err = refused(capsys, command_line(flags, reward=f"judge,{bad}/r.py:{name}"))
    assert line in err.splitlines()[-1]
    for frame in frames:
        assert frame in err
    assert not Path(flags["out_dir"]).exists()


@pytest.mark.parametrize("text", ERRORS)
@pytest.mark.parametrize("flag", ["", "--reward="])
def test_a_file_that_does_not_run_shows_why(flags, tmp_path, capsys, text, flag):
    (tmp_path / "error.py").write_text(text)
    function = ":f" if flag else ""
    err = refused(capsys, [*command_line(flags), f"{flag}{tmp_path}/error.py{function}"])
    shown, line = ERRORS[text]
    assert 'error.py", line 1' in err and shown in err and line in err.splitlines()[-1]
    assert "runpy" not in err and "config.py" not in err


def test_the_default_text_is_made_when_all_other_files_were_found(
    flags, tmp_path, capsys, monkeypatch
):
    made = []
    monkeypatch.setattr(load, "prepare", made.append)
    monkeypatch.setattr(load, "ROOT", tmp_path)
    monkeypatch.setattr(checkpoint, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    default = command_line(flags, dataset="text")
    assert "judge_checkpoint: there is no" in refused(
        capsys, [*default, "--judge_checkpoint=no.pt"]
    )
    assert not made
    assert "there is no dataset in" in refused(capsys, default)
    assert made == [tmp_path / "data" / "text"]


def test_an_answer_that_is_no_number_ends_the_run(flags, capsys):
    """The last update left weights whose logits are NaN, so the run ends without saving them."""
    with pytest.raises(SystemExit) as end:
        train_grpo.main(command_line(flags, learning_rate=1e9, max_iters=1))
    assert end.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    named = "not finite: the generator's logits after the update (log_prob=nan)"
    assert last.startswith(f"train_grpo.py: step 0: {named}; try a lower learning_rate")
    assert last.endswith("nothing was saved yet")
    assert not (Path(flags["out_dir"]) / "checkpoint.pt").exists()


def test_a_reward_that_needs_a_gradient_is_a_reward(flags, tmp_path):
    (tmp_path / "r.py").write_text(GRADIENT)
    _, metrics = run(flags, reward=f"{tmp_path}/r.py:slope", max_iters=2, num_iterations=2)
    assert {line["mean_reward"] for line in metrics} == {2.0}
    table = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert table["after_sample"]["reward_slope"] == 2


def test_a_terminal_that_is_not_utf8_ends_no_run(flags, monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    train_grpo.main(command_line(flags))
    shown.flush()
    assert b"mean_reward   " in shown.buffer.getvalue()


# Rare cases that are no mistakes.


def test_a_reward_may_import_what_lies_beside_it(flags, tmp_path):
    (tmp_path / "beside.py").write_text("answer = 42")
    text = "from beside import answer\ndef f(y, *_):\n    return 0 * y[..., 0] + answer"
    (tmp_path / "r.py").write_text(text)
    _, metrics = run(flags, reward=f"{tmp_path}/r.py:f", max_iters=1)
    assert metrics[0]["mean_reward"] == 42


def test_a_path_may_begin_at_home(flags, tmp_path, monkeypatch):
    """No shell expands the ~ of --out_dir=~/out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(["--out_dir=~/out"]).out_dir == f"{tmp_path}/out"


def test_a_dataset_may_be_named_as_the_folder_that_it_is(flags, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(world / "text", "data/mine")
    for name in ("mine", "data/mine", tmp_path / "data" / "mine"):
        data, _ = load.load_data(str(name), 16)
        assert len(data.tokens) > 1000


def test_commands_are_quoted(flags, tmp_path, capsys):
    out = tmp_path / "my run"
    run(flags, out_dir=out, max_iters=1)
    said = capsys.readouterr().out
    assert f"python -m grpo.evaluation '{out}'" in said and f"--run='{out}'" in said


def test_ctrl_c_while_a_run_starts_is_no_traceback(flags, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "load_model", interrupted)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as end:
        train_grpo.main(command_line(flags))
    assert end.type is SystemExit and end.value.code == 130
    assert not capsys.readouterr().err
