"""Whatever a user gets wrong is one line, and not a byte is written.

Exit code 2, and on stderr the value, what is allowed, the fix.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import command_line

import train_grpo
from grpo.plumbing.checkpoint import model_file, read, write
from model.transformer import Generator, TransformerConfig

# Arguments after those of a run that works -> what the line says. {x} is the folder `bad`, {w} the
# folder `world`.
MISTAKES = {
    # flags
    "--grup_size=8": "there is no setting 'grup_size'; did you mean 'group_size'?",
    "--banana=1": "there is no setting 'banana'; --help lists them",
    "--group_size": "group_size='' is not allowed",
    "--group_size=8.5": "group_size='8.5' is not allowed; group_size takes int from 2 to 2147",
    "--batch_size=0": "batch_size takes int from 1 to",
    "--temperature=nan": "temperature takes float from 0.001 to 100",
    "--judge_score=odds": "judge_score takes log_odds or probability",
    "--loss_type=ppo": "loss_type takes grpo or dapo or bnpo or dr_grpo or sum",
    "--wandb_log=maybe": "wandb_log takes bool",
    "--masking=words": "random, span, word, short, sticky",
    "--masking=word:-1": "WEIGHT more than 0",
    "--top_p=1.5": "top_p takes float from 1e-09 to 1",
    "--dtype=float16": "dtype takes auto or float32 or bfloat16",
    "--beta1=1": "Invalid beta parameter",
    "--device=banana": "device banana is not on this machine; it has cpu",
    "--kernel=cuda": "kernel",
    "--reward=jugde": "allowed: NAME or NAME:WEIGHT, each NAME once: judge, valid_words, FILE.py",
    "--reward=judge,{x}/r.py:judge": "two parts are called judge; rename one",
    # flags that do not go together
    "--out_dir=": "out_dir is empty; write for example out_dir=out",
    "--importance_sampling_level=none --num_iterations=2": "set num_iterations=1",
    "--block_size=17": "block_size=17 is more than the 16 characters that the gener",
    # config files
    "group_size=8": "does not run (FileNotFoundError",
    "{x}/slip.py": "there is no setting 'grup_size'; did you mean 'group_size'?",
    "{x}/import.py": "there is no setting 'math'; --help lists them; a config file's own",
    "{x}/error.py": "does not run (ZeroDivisionError: division by zero); fix it",
    "{x}/bare.py": "batch_size has no value; write batch_size = VALUE",
    "{x}/nothing.py": "sets nothing; write for example group_size = 8",
    "{x}/type.py": "group_size=True is not allowed",
    "{x}/none.py": "out_dir=None is not allowed",
    # checkpoints
    "--judge_checkpoint={x}/no.pt": "no.pt cannot be read: it is missing, damaged or no",
    "--judge_checkpoint={x}/cut.pt": "cut.pt cannot be read: it is missing, damaged",
    "--judge_checkpoint={x}/slip.py": "slip.py cannot be read",
    "--judge_checkpoint={w}/generator.pt": "holds a generator, a judge is needed; are the two",
    "--generator_checkpoint={x}/digits.pt": "has the vocabulary '01_', ' abc",
    "--generator_checkpoint={x}/wider.pt": "torch.Size([3, 3]) from checkpoint, the shape",
    "--reference_checkpoint={w}/mixture.pt": "the generator has 1 values of a latent, the ref",
    "--out_dir={x} --generator_checkpoint={x}/wider.pt": "wider.pt lies in out_dir, which a new",
    "--out_dir={x}/no --init_from=resume": "no/checkpoint.pt cannot be read",
    "--out_dir={x}/model --init_from=resume": "was not written by train_grpo.py; name the out_dir",
    # texts, prompts, folders
    "--dataset={x}/no": "there is no dataset in",
    "--prompts_file={x}/no.json": "No such file",
    "--prompts_file={x}/full.json": "'b' has no blank; write",
    "--out_dir={x}/slip.py": "slip.py is in use by another run, or cannot be written (File exists)",
}  # fmt: skip

CONFIGS = {
    "slip": "grup_size = 8",
    "import": "import math\ngroup_size = 8",
    "error": "group_size = 1 / 0",
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

def wrong_shape(completions, masked, mask, decode):
    return completions[:, 0]

def not_finite(completions, masked, mask, decode):
    return completions / 0.0

judge = broken
"""


@pytest.fixture(scope="module")
def bad(world, tmp_path_factory):
    """A folder of files that are wrong."""
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
    """-> what stands on stderr, of which the last line is the mistake's."""
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
    assert line in err
    assert err.count("\n") == 1
    assert listing(bad, world, tmp_path) == before


@pytest.mark.parametrize(
    "name, frames, line",
    [
        ("broken", ["return helper()", "return nowhere", "NameError"], "reward broken failed: Na"),
        ("wrong_shape", [], "it must return (B, G) = (2, 3)"),
        ("not_finite", [], "not finite"),
        ("no", ["KeyError: 'no'"], "r.py has no no or does not run; write def no(completions, ma"),
    ],
)
def test_a_mistake_in_a_reward_shows_all_frames_of_its_file(flags, bad, capsys, name, frames, line):
    """It is found at the start, on a few held-out inputs."""
    err = refused(capsys, command_line(flags, reward=f"judge,{bad}/r.py:{name}"))
    *traceback, last = err.splitlines()
    assert line in last
    assert bool(traceback) == bool(frames)
    for frame in frames:
        assert frame in err
    assert not Path(flags["out_dir"]).exists()


def test_a_reward_file_that_does_not_run_shows_why(flags, bad, capsys):
    err = refused(capsys, command_line(flags, reward=f"{bad}/error.py:f"))
    assert 'error.py", line 1' in err and "error.py has no f or does not run" in err
