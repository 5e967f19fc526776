"""A run that is killed, starved or fed nonsense ends in a clear line and a loadable checkpoint.

KILLS=50 and STEPS=20000 make the long ones as long as that.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import grpo.run
import train_grpo
from grpo.evaluate import Evaluation
from grpo.plumbing import log, setup
from grpo.plumbing.checkpoint import read, write
from grpo.plumbing.config import Config, exit_on_mistake
from grpo.plumbing.stop import Ending, RewardFailed, Stopped
from tests.conftest import command_line, figures, run, same


@pytest.fixture(scope="module")
def server():
    """Forks processes that have imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_grpo"])
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
    return context


def child(arguments, errors, limit):
    """A run whose stderr is a file, on a disk that takes no file of more than `limit` bytes."""
    loop = train_grpo.train

    def on_a_full_disk(run):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return loop(run)

    if limit:
        train_grpo.train = on_a_full_disk
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    sys.stderr = open(errors, "a", buffering=1)
    train_grpo.main(arguments)


def wait_for(condition):
    for _ in range(60000):
        if condition():
            return
        time.sleep(0.003)
    raise TimeoutError


class Run:
    """The program in a process of its own."""

    def __init__(self, server, flags, limit=0, **changes):
        self.out, self.errors = (
            Path((flags | changes)["out_dir"]),
            Path((flags | changes)["out_dir"] + "-errors.txt"),
        )
        self.errors.touch()
        self.process = server.Process(
            target=child, args=(command_line(flags, **changes), self.errors, limit)
        )
        self.process.start()

    def wait_for_step(self, n):
        wait_for(
            lambda: (
                (self.out / "metrics.jsonl").exists()
                and len((self.out / "metrics.jsonl").read_bytes().splitlines()) > n
            )
        )
        return self

    def kill(self, number):
        os.kill(self.process.pid, number)
        return self.end()

    def end(self):
        """-> exit code, and what the last line on stderr says, without the progress bar."""
        self.process.join(60)
        return self.process.exitcode, (self.errors.read_text().splitlines() or [""])[-1]


def same_run(a, b):
    """Two folders hold the same run, bit for bit: all but the settings, and the times."""
    x, y = (read(Path(folder) / "checkpoint.pt") for folder in (a, b))
    x["training"].pop("config"), y["training"].pop("config")
    return same(x, y) and figures(a) == figures(b)


def wait_for_change(path, before):
    wait_for(lambda: path.exists() and path.read_bytes() != before)


def test_killed_at_any_moment_it_resumes_bit_for_bit(server, flags, tmp_path):
    """kill -9 again and again, in one folder, of a run that saves every step.

    The checkpoint always loads, and the end is that of a run never killed.
    """
    kills, out, draw = int(os.environ.get("KILLS", 5)), Path(flags["out_dir"]), random.Random(1)
    flags = flags | {
        "max_iters": 30 * kills,
        "eval_interval": 10**6,
        "reference_mode": "ema",
        "num_iterations": 2,
    }
    run(flags, out_dir=tmp_path / "whole")
    checkpoint = out / "checkpoint.pt"
    for _ in range(kills):
        before = checkpoint.read_bytes() if checkpoint.exists() else b""
        start = "resume" if before else "pretrained"
        life = Run(server, flags, save_interval=1, init_from=start)
        if draw.random() < 0.8:  # else while it starts
            wait_for_change(checkpoint, before)
        time.sleep(draw.uniform(0, 0.5))
        assert life.kill(signal.SIGKILL)[0] == -signal.SIGKILL
        if checkpoint.exists():
            assert 0 < read(checkpoint)["training"]["iteration"] < flags["max_iters"]
    (out / "checkpoint.pt.1.tmp").write_bytes(b"half of a write that a kill cut short")
    run(flags, init_from="resume")
    assert same_run(out, tmp_path / "whole") and not list(out.glob("*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(server, flags, tmp_path, number):
    flags = flags | {"max_iters": 300, "save_interval": 1000, "eval_interval": 1000}
    code, line = Run(server, flags).wait_for_step(2).kill(number)
    done = read(Path(flags["out_dir"]) / "checkpoint.pt")["training"]["iteration"]
    assert (
        code == 128 + number
        and f"stopped by {number.name} after step {done - 1}; --init_from=resume --out_dir=" in line
        and f"goes on from step {done}" in line
        and 2 < done < 300
    )
    said = Path(flags["out_dir"] + "-errors.txt").read_text()
    assert said.count("finishing the step; again: stop now") == 1
    train_grpo.main(
        ["--init_from=resume", f"--out_dir={flags['out_dir']}", f"--max_iters={done + 2}"]
    )
    run(flags, max_iters=done + 2, lr_decay_iters=300, out_dir=tmp_path / "whole")
    assert same_run(flags["out_dir"], tmp_path / "whole")


def test_a_second_signal_stops_at_once(server, flags, tmp_path):
    (tmp_path / "slow.py").write_text(f"""import os, time
def slow(completions, masked, mask, decode):
    if len(completions) == 4:  # not the trial at the start
        os.mkdir("{tmp_path}/begun")
        time.sleep(60)
    return [[0.0] * completions.shape[1]] * len(completions)""")
    slow = Run(
        server, flags, reward=f"judge,{tmp_path}/slow.py:slow", out_dir=str(tmp_path / "out")
    )
    wait_for((tmp_path / "begun").exists)
    os.kill(slow.process.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert slow.process.is_alive()
    assert slow.kill(signal.SIGTERM)[0] == -signal.SIGTERM


def test_a_full_disk_keeps_the_checkpoint(server, flags):
    """Saving, and writing a line of metrics: one line, and the checkpoint of before."""
    flags, out = flags | {"max_iters": 6, "lr_decay_iters": 6}, Path(flags["out_dir"])
    run(flags, max_iters=2)
    whole, size = (out / "checkpoint.pt").read_bytes(), (out / "metrics.jsonl").stat().st_size
    for limit in (len(whole) - 1, size + 100):
        code, line = Run(server, flags, limit, init_from="resume").end()
        assert code == 1 and "File too large" in line and "--init_from=resume --out_dir=" in line
        assert (out / "checkpoint.pt").read_bytes() == whole and not list(out.glob("*.tmp"))
    run(flags, init_from="resume")


def test_a_new_run_in_an_old_folder(flags, capsys):
    """What was there is kept whole, in a folder of its own; the user's own files stay."""
    out = Path(flags["out_dir"])
    run(flags)
    old = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "mine.tmp").write_text("a file of the user's")
    run(flags, seed=2)
    assert f"{out} held a run: its files are in {out}/earlier-1 now" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(flags, seed=3, learning_rate=1e30, grad_clip=0)
    assert {path.name: path.read_bytes() for path in (out / "earlier-1").iterdir()} == old
    assert json.loads((out / "earlier-2" / "config.json").read_text())["seed"] == 2
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "mine.tmp",
        "earlier-1",
        "earlier-2",
    }


@pytest.mark.parametrize("blocked", ["write", "make_folder"])
def test_a_refused_run_leaves_the_one_that_is_there(flags, monkeypatch, capsys, blocked):
    """No space, no inodes: whichever of its writes fails first, nothing has been changed."""
    out = Path(flags["out_dir"])
    run(flags)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(path, *_):
        if Path(path) != out:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, blocked, fail)
    with pytest.raises(SystemExit) as stop:
        run(flags, seed=2)
    assert stop.value.code == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    left = {path.name: path.read_bytes() for path in out.iterdir()}
    left.pop("config.json.next.tmp", None)
    assert left == before


def test_a_damaged_checkpoint_names_the_one_before(flags, capsys):
    flags, out = flags | {"lr_decay_iters": 6}, Path(flags["out_dir"])
    run(flags, save_interval=2)
    (out / "checkpoint.pt").write_bytes((out / "checkpoint.pt").read_bytes()[:-100])
    with pytest.raises(SystemExit):
        run(flags, init_from="resume", max_iters=6)
    assert (
        f"damaged or no checkpoint; {out}/checkpoint_prev.pt is the one saved before it: "
        "rename it to checkpoint.pt" in capsys.readouterr().err
    )
    os.replace(out / "checkpoint_prev.pt", out / "checkpoint.pt")
    assert run(flags, init_from="resume", max_iters=6)[0]["training"]["iteration"] == 6


def test_a_damaged_line_of_metrics_is_named(flags, capsys):
    out = Path(flags["out_dir"])
    run(flags, lr_decay_iters=6)
    (out / "metrics.jsonl").write_text("{half\n" + (out / "metrics.jsonl").read_text())
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(SystemExit) as stop:
        run(flags, lr_decay_iters=6, max_iters=6, init_from="resume")
    assert (
        stop.value.code == 2
        and "metrics.jsonl has a line that is no step's, in JSON; take it out"
        in capsys.readouterr().err
    )
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize("line", ["{half", "[]", "3", '{"loss": 1}', '{"iteration": "3"}'])
def test_a_line_that_is_no_step_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match="metrics.jsonl has a line that is no step's, in JSON"):
        log.read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    "changes",
    [
        *({"loss_type": t} for t in ("grpo", "dapo", "bnpo", "dr_grpo", "sum")),
        {"gradient_accumulation_steps": 3},
        {"num_iterations": 4},
        {"reference_mode": "ema", "ema_alpha": 0.3},
        {"reference_mode": "periodic", "reference_update_freq": 2, "minibatch_size": 2},
    ],
)
def test_n_steps_and_n_more_are_2n(flags, tmp_path, changes):
    flags = flags | {"max_iters": 4, "lr_decay_iters": 4, "eval_inputs": 2} | changes
    run(flags, out_dir=tmp_path / "whole")
    run(flags, max_iters=2)
    run(flags, init_from="resume")
    assert same_run(flags["out_dir"], tmp_path / "whole")


@pytest.mark.parametrize(
    "bad, named",
    [
        ("generator", "the generator's logits"),
        ("reference", "the reference's logits"),
        ("judge", "the rewards"),
        ("gradient", "the gradient"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_changes_no_weight(flags, monkeypatch, bad, named, value):
    """The step and the tensor are named; weights, moments and checkpoint are those of before."""
    calls, before = [], []
    real = train_grpo.grpo_step

    def step(policy, reference, rewards, optimizer, *rest):
        calls.append(1)
        if len(calls) < 3:
            return real(policy, reference, rewards, optimizer, *rest)
        parameters = optimizer.parameters
        state = optimizer.adamw.state
        before.extend(x.clone() for p in parameters for x in (p.detach(), *state[p].values()))

        def spoil(model):
            return lambda tokens: model(tokens).index_fill(0, torch.tensor([0]), value)

        if bad == "gradient":
            parameters[0].register_hook(lambda gradient: gradient.fill_(value))
        if bad == "judge":
            nothing = torch.tensor(float("nan"))
            monkeypatch.setattr(rewards, "score", lambda _, fills, *__: nothing.expand(fills.shape))
        result = real(
            spoil(policy) if bad == "generator" else policy,
            spoil(reference) if bad == "reference" else reference,
            rewards,
            optimizer,
            *rest,
        )
        after = [x for p in parameters for x in (p.detach(), *state[p].values())]
        assert all(torch.equal(a, b) for a, b in zip(before, after))
        return result

    monkeypatch.setattr(train_grpo, "grpo_step", step)
    with pytest.raises(SystemExit) as stop:
        run(flags, save_interval=2, log_interval=4)
    assert (
        stop.value.code == 1
        and before
        and read(Path(flags["out_dir"]) / "checkpoint.pt")["training"]["iteration"] == 2
    )


def test_a_diverging_run_says_so(flags, capsys):
    """Resumed, it would stop there again: nobody is told to."""
    with pytest.raises(SystemExit) as stop:
        run(flags, learning_rate=1e30, grad_clip=0, save_interval=1)
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1
    assert (
        "step 1: not finite: the generator's logits (entropy=nan); begin anew with a lower" in line
    )
    assert "resume" not in line


def test_infinite_weights_are_not_saved(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        run(flags, learning_rate=1e300, grad_clip=0, save_interval=1)
    assert stop.value.code == 1
    assert "not finite" in capsys.readouterr().err.splitlines()[-1]
    assert not (Path(flags["out_dir"]) / "checkpoint.pt").exists()


TIRED = """
import sys
calls = []

def tired(completions, masked, mask, decode):
    calls.append(1)
    if len(calls) == 4:
        sys.exit()
    return [[0.0] * completions.shape[1]] * len(completions)

def careful(completions, masked, mask, decode):
    return completions.float().mean(dim=-1)

def careless(completions, masked, mask, decode):
    values = careful(completions, masked, mask, decode)
    completions.zero_(), masked.zero_(), mask.zero_()
    return values
"""


def test_a_reward_that_ends_the_program_is_one_line(flags, tmp_path, capsys):
    """With its file and line, and an exit code that is not 0."""
    (tmp_path / "r.py").write_text(TIRED)
    with pytest.raises(SystemExit) as stop:
        run(flags, reward=f"judge,{tmp_path}/r.py:tired", save_interval=1)
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1
    assert "train_grpo.py: reward tired failed: SystemExit: " in line
    assert f"{tmp_path}/r.py, line 8); mend it; --init_from=resume --out_dir=" in line


def test_a_reward_cannot_change_what_it_judges(flags, tmp_path):
    (tmp_path / "r.py").write_text(TIRED)
    for name in ("careful", "careless"):
        run(flags, reward=f"{tmp_path}/r.py:{name}", out_dir=tmp_path / name)
    read_only = figures(tmp_path / "careful")
    for a, b in zip(read_only, figures(tmp_path / "careless"), strict=True):
        assert list(a.values()) == list(b.values())  # but for the reward's name


@pytest.mark.parametrize(
    "saved, in_steps, complete, told",
    [
        (0, True, False, "nothing was saved yet"),
        (3, True, False, "--init_from=resume --out_dir={out} goes on from step 3"),
        (9, True, False, "all steps are done and saved: python -m grpo.evaluate {out} makes"),
        (9, False, False, "all steps are done and saved: python -m grpo.evaluate {out} makes"),
        (9, False, True, "the run is complete: its table is in {out}/evaluation.json"),
    ],
)
def test_what_is_true_of_a_run_that_ends(tmp_path, capsys, saved, in_steps, complete, told):
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    out_of_memory = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
    errors = [OSError(28, "No space left"), RewardFailed("it"), out_of_memory, MemoryError()]
    for error in errors + [Stopped("stopped by SIGTERM", 143), KeyboardInterrupt()]:
        ending = Ending(Config(out_dir=str(tmp_path), max_iters=9), saved)
        ending.in_steps = in_steps
        ending.complete = complete
        with pytest.raises(SystemExit) as stop, ending:
            raise error
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and told.format(out=tmp_path) in line
        assert stop.value.code == {Stopped: 143, KeyboardInterrupt: 130}.get(type(error), 1)
        if error in errors[2:]:
            assert "out of memory: " in line
            assert ("--gradient_checkpointing" in line) == in_steps


def test_what_is_no_file_is_not_gone_on_from(tmp_path):
    """A folder in the checkpoint's place."""
    (tmp_path / "checkpoint.pt").mkdir()
    ending = Ending(Config(out_dir=str(tmp_path)), 3)
    assert ending.prospects() == "nothing was saved yet"


def test_an_error_of_the_program_is_no_line(tmp_path):
    with pytest.raises(RuntimeError, match="a bug"), Ending(Config(out_dir=str(tmp_path)), 0):
        raise RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"), exit_on_mistake("x"):
        raise RuntimeError("a bug")


def test_a_signal_in_the_last_step_names_the_table(flags, monkeypatch, capsys):
    monkeypatch.setattr(Ending, "requested", lambda ending: (ending.saved == 3) * signal.SIGINT)
    with pytest.raises(SystemExit) as stop:
        run(flags, save_interval=1)
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 130
    assert "stopped by SIGINT after step 3; all steps are done" in line
    assert f"python -m grpo.evaluate {flags['out_dir']} makes the table" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["the table", "wandb"])
def test_a_signal_after_the_steps_ends_the_run_at_once(flags, monkeypatch, capsys, number, place):
    where = (Evaluation, "finish") if place == "the table" else (log.Log, "evaluation")
    real = getattr(*where)

    def finish(*arguments):
        signal.raise_signal(number)
        return real(*arguments)

    monkeypatch.setattr(*where, finish)
    with pytest.raises(SystemExit) as stop:
        run(flags)
    shown = capsys.readouterr()
    line = shown.err.splitlines()[-1]
    assert stop.value.code == 128 + number
    assert f"stopped by {number.name}; " in line
    if place == "the table":
        assert "makes the table" in line
    else:
        assert "the run is complete: its table is in" in line and "gap closed" in shown.out


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Ending(Config(out_dir=str(tmp_path)), 0):
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_deleted_folder_is_noticed(flags, monkeypatch, capsys):
    real = train_grpo.grpo_step
    calls = []

    def step(*arguments):
        calls.append(1)
        if len(calls) == 3:
            shutil.rmtree(flags["out_dir"])
        return real(*arguments)

    monkeypatch.setattr(train_grpo, "grpo_step", step)
    with pytest.raises(SystemExit) as stop:
        run(flags, save_interval=1)
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1
    assert f"out_dir={flags['out_dir']} was deleted; nothing was saved" in line
    assert not Path(flags["out_dir"]).exists()


def test_compiling_that_cannot_work_is_refused(flags, monkeypatch, capsys):
    monkeypatch.setattr(setup, "can_compile", lambda: False)
    with pytest.raises(SystemExit) as stop:
        run(flags, compile="true")
    assert stop.value.code == 2
    assert (
        "compile=true needs a C++ compiler that works; set compile=false" in capsys.readouterr().err
    )
    assert not Path(flags["out_dir"]).exists()


def test_too_much_memory_is_a_mistake_of_one_line(capsys):
    for error in (MemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9")):
        with pytest.raises(SystemExit) as stop, exit_on_mistake("x"):
            raise error
        assert stop.value.code == 2
        assert "more memory than there is: ask for less at once\n" in capsys.readouterr().err


def test_a_mistake_is_told_whatever_the_environment_holds(monkeypatch, capsys):
    """RANK may be left over from another program; and what one process meets, it tells."""
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        train_grpo.main(["--grup_size=8"])
    assert capsys.readouterr().err.startswith("train_grpo.py: --grup_size=8: there is no setting")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        train_grpo.main(["--grup_size=8"])
    assert capsys.readouterr().err.startswith("process 1: train_grpo.py: --grup_size=8: there is")


@pytest.mark.parametrize(
    "text, mask, shown",
    [
        ("the cat", "0000000", "the cat"),
        ("the cat", "1110010", "[the] c[a]t"),
        ("the cat", "0001111", "the[ cat]"),
        ("the cat", "1111111", "[the cat]"),
    ],
)
def test_runs_of_blanks_stand_in_brackets(text, mask, shown):
    assert log.highlight(text, [flag == "1" for flag in mask]) == shown


def test_a_closed_stdout_is_no_mistake(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    train_grpo.main(["--help"])


def test_head_ends_it_quietly():
    command = f"{sys.executable} train_grpo.py --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode in (0, 141) and done.stderr == "" and done.stdout.startswith("usage")


@pytest.mark.parametrize(
    "program",
    [
        "train_grpo.py",
        "-m grpo.evaluate",
        "-m grpo.fill",
        "-m grpo.compare",
        "-m grpo.bench",
        "-m grpo.toy",
        "-m grpo.group",
        "-m model.pretrain",
    ],
)
def test_ctrl_c_while_it_imports_is_one_line(tmp_path, program):
    """It comes while torch is imported, which takes seconds."""
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, *program.split()],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "stopped\n" and done.stdout == ""
    assert done.returncode == -signal.SIGINT  # which a shell calls 130


def test_a_program_that_imports_grpo_keeps_its_own_ctrl_c(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import grpo, sys\nassert sys.excepthook is sys.__excepthook__"
    )
    here = os.environ | {"PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, tmp_path / "mine.py"], env=here, check=True)


def warnings_of(flags, capsys, **changes):
    """What a run says on stderr, without the bar."""
    run(flags, **changes)
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    return [line for line in lines if line.startswith("train_grpo.py: ")]


@pytest.mark.parametrize("learning_rate", [1, 1e-6])
def test_a_ruined_policy_is_noticed(flags, world, tmp_path, capsys, learning_rate):
    """Once, by what its fills are to the reference; a sane learning rate is not spoken of."""
    content = read(world / "generator.pt")
    content["weights"]["head.weight"] *= 50  # a generator that prefers something
    write(tmp_path / "sure.pt", content)
    said = warnings_of(
        flags,
        capsys,
        generator_checkpoint=tmp_path / "sure.pt",
        learning_rate=learning_rate,
        top_p=1.0,
        max_iters=6,
    )
    assert len(said) == (learning_rate == 1)
    for line in said:
        assert "the reference finds these fills less likely than characters drawn blindly" in line
        assert "begin anew with a lower learning_rate" in line


CONSTANT = """
def constant(completions, masked, mask, decode):
    return [[len(text) for text in decode(group)] for group in completions]

def by_input(completions, masked, mask, decode):
    return [[i] * len(group) for i, group in enumerate(completions)]

def sometimes(completions, masked, mask, decode):
    calls.append(1)
    if len(calls) == 3:
        return completions.float().mean(dim=-1)
    return constant(completions, masked, mask, decode)

calls = []
"""


def test_a_reward_that_tells_nothing_apart_is_named_once(flags, tmp_path, capsys):
    """By its part's name, at the first look; one that does so in some step is none of these."""
    (tmp_path / "r.py").write_text(CONSTANT)
    parts = [f"{tmp_path}/r.py:{name}" for name in ("constant", "by_input", "sometimes")]
    reward = ",".join(["judge", *parts])
    said = warnings_of(flags, capsys, reward=reward, eval_interval=3, learning_rate=1e-4)
    for name, line in zip(("constant", "by_input"), said, strict=True):
        assert f"reward {name} was the same for all completions of every group in 3 steps" in line


def test_another_judge_of_the_reward_is_noticed_on_resume(flags, world, tmp_path, capsys):
    judge = tmp_path / "strict.pt"
    shutil.copy(world / "judge.pt", judge)
    run(flags, reward=f"judge:0.5,{judge}:0.5", max_iters=2, lr_decay_iters=4)
    content = read(judge)
    content["weights"]["head.bias"] += 1
    write(judge, content)
    with pytest.raises(SystemExit) as stop:
        train_grpo.main(["--init_from=resume", f"--out_dir={flags['out_dir']}", "--max_iters=4"])
    assert stop.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"resume: reward {judge} is not the file that the run in {flags['out_dir']}" in line
    assert "put that back, or begin a new out_dir" in line
    shutil.copy(world / "judge.pt", judge)
    train_grpo.main(["--init_from=resume", f"--out_dir={flags['out_dir']}", "--max_iters=4"])


def test_two_runs_do_not_share_a_folder(server, flags, capsys):
    flags = flags | {"max_iters": 2000, "eval_interval": 10**6}
    first = Run(server, flags).wait_for_step(1)
    with pytest.raises(SystemExit) as stop:
        run(flags, max_iters=3, seed=2)
    assert (
        stop.value.code == 2
        and "is in use by another run; wait for its end, or name another out_dir"
        in capsys.readouterr().err
    )
    assert json.loads((first.out / "config.json").read_text())["seed"] == 1
    first.kill(signal.SIGKILL)
    run(flags, max_iters=3, seed=2)  # a dead run leaves no lock behind


def children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in found.split()]


def as_two_ranks(arguments, errors):
    """What torchrun does, in a process that has imported everything already."""
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    two = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
    )
    elastic_launch(two, train_grpo.main)(arguments)


@pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("trouble", ["a rank is killed", "the first rank cannot save"])
def test_ranks_end_together(server, flags, tmp_path, trouble):
    out = Path(flags["out_dir"])
    if trouble == "the first rank cannot save":  # but for the first time
        (out / "checkpoint_prev.pt").mkdir(parents=True)
    metrics = out / "metrics.jsonl"
    changes = {"max_iters": 10**5, "eval_interval": 10**6, "save_interval": 3, "compile": "false"}
    endless = command_line(flags, **changes)
    errors = tmp_path / "errors.txt"
    errors.touch()
    launcher = server.Process(target=as_two_ranks, args=(endless, errors))
    launcher.start()
    try:
        wait_for(lambda: not launcher.is_alive() or metrics.exists() and metrics.stat().st_size)
        ranks = children(launcher.pid)
        if trouble == "a rank is killed":
            os.kill(ranks[-1], signal.SIGKILL)
        launcher.join(60)
        assert launcher.exitcode == 1, errors.read_text()
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    finally:
        launcher.terminate()


def test_a_long_run_stays_flat(flags):
    """Memory and file handles do not grow, metrics.jsonl is complete."""
    steps, seen, real = int(os.environ.get("STEPS", 150)), [], grpo.run.fetch

    def fetch(pending):
        seen.append(
            (
                int(Path("/proc/self/statm").read_text().split()[1]) * 4,
                len(os.listdir("/proc/self/fd")),
            )
        )  # kB, handles
        return real(pending)

    grpo.run.fetch = fetch
    try:
        run(flags, max_iters=steps, save_interval=steps // 3, eval_interval=steps)
    finally:
        grpo.run.fetch = real
    print("kB and handles:", seen[steps // 10], seen[steps // 2], seen[-1])
    assert [line["iteration"] for line in figures(flags["out_dir"])] == list(range(steps))
    assert seen[-1][1] <= seen[steps // 10][1] and seen[-1][0] < 1.1 * seen[steps // 10][0] + 20000
