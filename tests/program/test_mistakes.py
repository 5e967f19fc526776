"""Check that a user's mistake ends a program with exit code 2 before anything is written.

One line on stderr names the setting or the file. Every other error keeps its traceback.
"""

import sys

import pytest
from conftest import command_line, run, write_text

import train_grpo
from data.files import PROJECT
from data.user_mistake import Mistake, run_program
from grpo.evaluation import __main__ as evaluation
from grpo.experiments import (
    compare,
    fair,
    gradient,
    grid,
    strengths,
    supervised,
    text,
    through,
    tokens_claims,
)
from grpo.run import load
from grpo.run.config import load_config
from grpo.tools import fill, replay, toy
from model import pretrain

# Each line has a program and its arguments. The flags of a run that works stand before those of
# train_grpo. In {x} is the folder `bad`. The word after # has to be in the line that is printed.
COMMANDS = """
train --grup_size=8                                      # --group_size?
train --group_size                                       # --group_size=VALUE
train --group_size=8.5                                   # '8.5'
train --temperature=nan                                  # temperature
train --loss_type=ppo                                    # 'ppo'
train --compile=maybe                                    # 'maybe'
train --masking=vowels                                   # vowels
train --masking=columns                                  # masking=columns
train group_size=8                                       # 'group_size=8'
train a.yaml                                             # 'a.yaml'
train no_such_config.py                                  # no_such_config.py
train {x}/typo.py                                        # typo.py: there is no setting group_sizes
train {x}/broken.py                                      # broken.py, line 2: ZeroDivisionError
train {x}/sum.py                                         # loss_type
train --dataset=nothing                                  # nothing
train --dataset={x}/r.py                                 # r.py
train --device=banana                                    # banana
train --judge_checkpoint=no.pt                           # no.pt
train --generator_checkpoint={x}/cut.pt                  # cut.pt
train --block_size=17                                    # block_size=17
train --prompts_file={x}/prompts.json                    # prompt 1 'b'
train --prompts_file={x}/list.json                       # list.json
train --prompts_file={x}/none.json                       # no list of prompts
train --dataset={x}/latin                                # UTF-8
train --reference_checkpoint={latent}                     # another kind of network
train --reward=jugde                                     # jugde
train --reward={x}/r.py:no                               # no function no
train --reward={x}/r.py:flat                             # (8,)
train --reward={x}/r.py:words                            # didn't return numbers
train --reward={x}/r.py:nothing                          # didn't return numbers
train --reward={x}/r.py:nans                             # nans isn't finite
train --baseline=none                                    # scale_rewards=none
train --objective=reinforce --num_iterations=2           # num_iterations=1
train --init_from=resume                                 # checkpoint.pt
train --out_dir={x}                                      # bad
train --prompts_file={x}                                 # bad
pretrain --masking=vowels                                # vowels
pretrain --out_dir={x}                                   # exists
pretrain --out_dir={x}/r.py/out                          # inside a file
pretrain --dataset=sums --block_size=11 --masking=columns  # judge_masking
toy --group_size=four                                    # 'four'
fill                                                     # with blanks
fill th_ --run=nowhere                                   # nowhere
replay nowhere                                           # nowhere
compare {x}/r.py                                         # lines of JSON
evaluation nowhere                                       # nowhere
supervised most out                                      # smallest
supervised any out --rounds=7                            # rounds=7
supervised slow out --order=2,6                          # order=2,6
supervised slow out --order=2-99                         # order=2-99
supervised any {x}/r.py/out                              # inside a file
strengths eighth                                         # name a folder
tokens_claims out                                        # no words
through straight config/text.py                          # for sums
text nowhere --judge=nowhere                             # nowhere
fair out config/rule.py --top_k=1                        # truncation
fair out config/rule.py --seeds=one                      # 'one'
fair out config/rule.py --seeds=5-1                      # from 1 on
fair out config/rule.py --kl_beta=.1,                    # .01,.02
fair --seeds=1 config/rule.py                            # before any flags
grid --seeds=1                                           # before any flags
gradient bias                                            # baseline
"""
REWARDS = """
def flat(completions, batch):
    return completions[:, 0, 0]

def words(completions, batch):
    return [["good"] * len(row) for row in completions]

def nothing(completions, batch):
    pass

def nans(completions, batch):
    return completions[:, :, 0] * float("nan")
"""
FILES = {
    "r.py": REWARDS,
    "typo.py": "group_sizes = 4",
    "broken.py": "seed = 1\nkl_beta = 1 / 0",
    "sum.py": "loss_type = sum",
    "prompts.json": '{"prompts": ["a_", "b"]}',
    "list.json": '["_"]',
    "none.json": '{"prompts": []}',
    "cut.pt": "PK",
}
PROGRAMS = {
    "train": train_grpo,
    "pretrain": pretrain,
    "toy": toy,
    "fill": fill,
    "replay": replay,
    "evaluation": evaluation,
    "supervised": supervised,
    "fair": fair,
    "compare": compare,
    "grid": grid,
    "strengths": strengths,
    "gradient": gradient,
    "through": through,
    "text": text,
    "tokens_claims": tokens_claims,
}


@pytest.fixture
def bad(tmp_path, monkeypatch):
    """Write files that a program must refuse: -> their folder, which isn't the working one."""
    folder = tmp_path / "bad"
    for name, content in FILES.items():
        write_text(folder / name, content)
    for name in ("train.txt", "val.txt"):
        write_text(folder / "latin" / name, "")
        (folder / "latin" / name).write_bytes(b"caf\xe9 " * 40)
    (tmp_path / "here").mkdir()
    for name in ("config", "data", "model"):
        (tmp_path / "here" / name).symlink_to(PROJECT / name)
    monkeypatch.chdir(tmp_path / "here")
    return folder


@pytest.mark.parametrize("line", COMMANDS.strip().splitlines())
def test_a_mistake_is_one_line_and_nothing_is_written(
    world, flags, bad, tmp_path, capsys, monkeypatch, line
):
    command, _, named = line.partition("#")
    program, *arguments = command.format(x=bad, latent=world / "latent.pt").split()
    if program == "train":
        arguments = command_line(flags) + arguments
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match="^2$"):
        run_program(PROGRAMS[program].main)
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and named.strip() in err


def test_help_is_printed_and_nothing_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "out", "--help"])
    run_program(None, "what it does")
    assert capsys.readouterr().out == "what it does\n"


def test_other_errors_are_not_turned_into_an_exit(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])
    for error in (AssertionError, FloatingPointError, OSError):

        def fail(arguments, error=error):
            raise error

        with pytest.raises(error):
            run_program(fail)


def test_sums_are_made_when_all_other_files_were_found(flags, monkeypatch):
    made = []
    monkeypatch.setattr(load, "make_if_missing", made.append)
    with pytest.raises(FileNotFoundError, match="no.pt"):
        run(flags, judge_checkpoint="no.pt")
    assert not made
    run(flags, max_iters=1)
    assert made == [flags["dataset"]]


@pytest.mark.parametrize(
    "flag", ["generator_checkpoint={}", "dataset={}", "prompts_file={}", "reward=judge,{}:0.5"]
)
def test_no_file_is_moved_aside_with_the_old_run(tmp_path, flag):
    with pytest.raises(Mistake, match="out_dir=.* is where .*a.pt.* is; name another folder"):
        load_config([f"--out_dir={tmp_path}", "--" + flag.format(tmp_path / "models" / "a.pt")])
