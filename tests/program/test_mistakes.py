"""Check that a user's mistake ends a program with exit code 2 before anything is written.

One line on stderr names the setting or the file. Every other error keeps its type.
"""

import re
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import command_line, run, write_text

import train_grpo
from data import files
from data.files import shipped_path
from data.user_mistake import Mistake, exit_on_mistake
from grpo.run import load
from grpo.run.checkpoint import read, write
from grpo.run.config import Config, load_config
from grpo.run.log import how_to_resume
from grpo.run.origin import made_with
from grpo.tools import fill, replay, toy
from model import pretrain

# Each line has the arguments of a command, of which the last one is a mistake. Those of train_grpo
# and pretrain stand after the arguments of a run that works. {x} is the folder `bad`, {w} is the
# folder `world`, and {long} is a name that no file can have. A file in `bad` is called after what
# is wrong in it.
MISTAKES = {
    "train": """
        --grup_size=8
        --group_size
        --group_size=8.5
        --group_size=1
        --temperature=nan
        --loss_type=ppo
        --gradient_checkpointing=maybe
        --masking=vowels
        --masking=columns
        --masking=word:1,word:3
        --resume
        --device=banana
        --device=mps
        --kernel=cuda
        --reward=jugde
        --reward=judge:
        --reward=judge:1e999
        --reward=judge,judge:2
        --reward=correct
        --reward=my.py
        --reward=judge,{x}/r.py:judge
        --reward={x}/r.py:judge
        --reward={x}/r.py:flat,{x}/own.py:flat
        --reward={x}/r.py:no
        --reward={x}/r.py:flat
        --reward={x}/r.py:of_one
        --reward={x}/r.py:of_each_character
        --reward={x}/r.py:not_finite
        --out_dir=
        --objective=reinforce --num_iterations=2
        --minibatch_size=3
        --block_size=17
        group_size=8
        --judge_checkpoint={x}/{long}.pt
        --prompts_file={x}
        {x}/group_size.py
        --judge_checkpoint={x}/no.pt
        --reward={x}/no.pt
        --reward={x}/no.py:f
        --judge_checkpoint={x}/cut.pt
        --judge_checkpoint={x}/empty.pt
        --judge_checkpoint={x}/r.py
        --judge_checkpoint={w}/generator.pt
        --reference_checkpoint={w}/latent.pt
        --reference_checkpoint={w}/digits.pt
        --reference_mode=ema --reference_checkpoint={w}/wide.pt
        --generator_checkpoint={w}/digits.pt --judge_checkpoint={w}/judge.pt
        --masking=random --dataset={x}/lines
        --init_from=resume --out_dir={x}/no
        --out_dir={x}
        --dataset={w}/text --out_dir={w}
        --dataset={x}/no
        --prompts_file={x}/no.json
        --prompts_file={x}/full.json
        --out_dir={x}/r.py""",
    "pretrain": """
        --masking=vowels
        --n_embd=100
        --out_dir={w}
        --start={w}/generator.pt --block_size=17
        --masking=random --judge_masking=random --dataset={x}/lines --start={w}/generator.pt""",
    "toy": """
        --n_latent=5
        --banana""",
    "fill": """
        c_t --k=0
        c_t --run=outt
        c_t --run={x}/{long}
        --run={w}/generator.pt the
        --run={x}/sums.pt h_l_""",
    "replay": """
        {x}
        {x}/begun""",
}
COMMANDS = [(name, line.strip()) for name in MISTAKES for line in MISTAKES[name].split("\n")[1:]]
REWARDS = """
import sys

def broken(completions, batch):
    return helper()

def helper():
    return nowhere

def flat(completions, batch):
    return completions[:, 0, 0]

def of_one(completions, batch):
    return completions[:, :1, 0]

def of_each_character(completions, batch):
    return completions

def not_finite(completions, batch):
    return completions[..., 0] / 0.0

def leaves(completions, batch):
    sys.exit()

judge = broken
"""
FILES = {  # in the folder `bad`
    "r.py": REWARDS,
    "group_size.py": "group_size = True",
    "lines/train.txt": "1 line of texts ",
    "lines/val.txt": "16 is another ab",
    "full.json": '{"prompts": ["a_", "b"]}',
    "empty.pt": "",
    "begun/config.json": '{"seed": 1}',
    "begun/metrics.jsonl": "",
}


@pytest.fixture(scope="module")
def bad(world, tmp_path_factory):
    """Make a folder of files that a program must refuse."""
    x = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        write_text(x / name, text)
    (x / "cut.pt").write_bytes((world / "judge.pt").read_bytes()[:9000])
    config = Config(generator_checkpoint=str(world / "digits.pt"), judge_checkpoint="")
    training = {"config": asdict(config), "made_with": made_with(config)}
    write(x / "sums.pt", read(world / "digits.pt") | {"training": training})
    return x


def listing(*folders):
    return [(p, p.stat().st_mtime_ns) for folder in folders for p in Path(folder).rglob("*")]


def start(program, arguments, flags):
    """Start a program as its command does. The flags of a run stand before the arguments."""
    if program == "train":
        with exit_on_mistake("train_grpo.py"):
            train_grpo.main(command_line(flags) + arguments)
    if program == "pretrain":
        names = ("dataset", "block_size", "out_dir")
        arguments = command_line({name: flags[name] for name in names}) + arguments
    mains = {"pretrain": pretrain, "toy": toy, "fill": fill, "replay": replay}
    mains[program].main(arguments)


@pytest.mark.parametrize("program, line", COMMANDS)
def test_a_mistake_is_one_line_and_nothing_is_written(
    flags, bad, world, tmp_path, capsys, monkeypatch, program, line
):
    monkeypatch.chdir(tmp_path)
    arguments = line.format(x=bad, w=world, long="a" * 300).split()
    before = listing(bad, world, tmp_path)
    with pytest.raises(SystemExit) as end:
        start(program, arguments, flags)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    flag, _, value = arguments[-1].partition("=")
    names = [Path(flag).stem.lstrip("-"), *([value.partition(":")[0]] if "/" in value else [])]
    assert any(name in err.partition(": ")[2] for name in names)
    assert listing(bad, world, tmp_path) == before


@pytest.mark.parametrize(
    "argument, shown",
    [
        ("{x}/error.py", "ZeroDivisionError: division by zero"),
        ("--reward={x}/error.py:f", "ZeroDivisionError: division by zero"),
        ("--reward=judge,{x}/r.py:broken", "NameError: name 'nowhere' is not defined"),
        ("--reward=judge,{x}/r.py:leaves", "SystemExit"),
    ],
)
def test_an_error_in_a_users_file_shows_its_traceback_and_then_the_line(
    flags, bad, capsys, argument, shown
):
    write_text(bad / "error.py", "group_size = 1 / 0")
    with pytest.raises(SystemExit, match="2"):
        start("train", [argument.format(x=bad)], flags)
    *above, error, last = capsys.readouterr().err.splitlines()
    assert error == shown and shown in last
    assert any(str(bad) in line for line in above)
    assert not Path(flags["out_dir"]).exists()


def test_sums_are_made_when_all_other_files_were_found(flags, monkeypatch):
    made = []
    monkeypatch.setattr(load, "make_if_missing", made.append)
    with pytest.raises(Mistake, match="no.pt is missing"):
        run(flags, judge_checkpoint="no.pt")
    assert not made
    run(flags)
    assert made == [flags["dataset"]]


def test_what_ships_is_found_from_another_folder_and_a_run_is_not(tmp_path, monkeypatch, capsys):
    """The commands that are printed there work there."""
    monkeypatch.chdir(tmp_path)
    small = "--max_iters=1 --batch_size=2 --group_size=2 --eval_inputs=2 --device=cpu"
    train_grpo.main(f"config/rule.py {small}")
    assert (tmp_path / "out-rule" / "checkpoint.pt").exists()
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "grpo.tools.replay" in x)
    subprocess.run(line, shell=True, check=True)
    resume = how_to_resume(Config(out_dir="out-rule")).partition(": ")[2]
    assert f" {files.PROJECT}/train_grpo.py --init_from=resume --out_dir=out-rule" in resume
    monkeypatch.setattr(files, "PROJECT", tmp_path)
    monkeypatch.chdir("/")
    assert shipped_path("out-sums") == Path("out-sums")  # and not the run in the project's folder


def test_mini_batches_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(Mistake, match="minibatch_size above 0 works with one process only"):
        load_config(["--minibatch_size=8"])


def test_other_errors_are_not_turned_into_an_exit():
    for error in (AssertionError, FloatingPointError, OSError):
        with pytest.raises(error), exit_on_mistake("program"):
            raise error


@pytest.mark.parametrize(
    "flag",
    [
        "generator_checkpoint={}",
        "dataset={}",
        "prompts_file={}",
        "reward=judge,{}:0.5",
        "reward={}/r.py:even",
    ],
)
def test_no_file_is_moved_aside_with_the_old_run(tmp_path, flag):
    with pytest.raises(Mistake, match="=.* is in out_dir, which a new run moves aside"):
        load_config([f"--out_dir={tmp_path}", "--" + flag.format(tmp_path / "models" / "a.pt")])


def test_what_a_user_may_not_read_is_one_line(tmp_path, capsys):
    for path in (tmp_path, "x" * 300):
        with pytest.raises(SystemExit, match="2"), exit_on_mistake("program"):
            open(path, encoding="utf-8")
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "name, content, line",
    [
        ("a.yaml", "group_size: 8", "a.yaml doesn't exist, or isn't a .py file"),
        ("a.py", "group_size: 8", "a.py assigns no setting; write for example group_size = 8"),
        (
            "a.py",
            "judge_checkpont = None",
            "no setting judge_checkpont; did you mean --judge_check",
        ),
        (
            "a.py",
            "group_sizes = [4]",
            "a.py: there is no setting group_sizes; did you mean --group",
        ),
        ("a.py", "group_size = [4]", "a.py: group_size: '[4]' is not a whole number from 2 to"),
        ("a.py", "judge_checkpoint = None", "a.py: judge_checkpoint: None is not a text"),
        ("a.py", "from os import path\nx = 3", "a.py: there is no setting x; --help lists them"),
        ("a.py", "dtype = float", "a.py: dtype: <class 'float'> is not auto or float32 or"),
    ],
)
def test_a_config_file_assigns_settings(tmp_path, name, content, line):
    write_text(tmp_path / name, content)
    with pytest.raises(Mistake, match=re.escape(line)):
        load_config([str(tmp_path / name)])
