"""Stop or kill a run in a process of its own, and check what it leaves."""

import os
import random
import signal
import sys
import time
from pathlib import Path

from conftest import command_line, figures, run, same

import train_grpo
from data.user_mistake import run_program
from grpo import distributed
from grpo.run.checkpoint import read
from grpo.run.signals import StopSignals


def child(arguments, errors):
    """Run the program with its stderr written to the file `errors`."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8")
    sys.argv[1:] = arguments
    run_program(train_grpo.main)


def wait_for(condition):
    for _ in range(20000):
        if condition():
            return
        time.sleep(0.003)
    raise TimeoutError


def start(server, flags, errors, **changes):
    """Start the program in a process of its own."""
    arguments = command_line(flags, **changes), errors
    process = server.Process(target=child, args=arguments, daemon=True)
    process.start()
    return process


def stop(process, number):
    """Send a signal, and wait for the end: -> the exit code."""
    os.kill(process.pid, number)
    process.join(60)
    return process.exitcode


def same_run(a, b):
    """Tell whether two folders hold the same run bit for bit, apart from settings and times."""
    contents = [read(Path(folder) / "checkpoint.pt") for folder in (a, b)]
    for content in contents:
        del content["training"]["config"], content["training"]["made_by"]
    return same(*contents) and figures(a) == figures(b)


def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(server, flags, tmp_path):
    """Here it is Ctrl-C. test_run.py sends SIGTERM during the last step."""
    flags = flags | {"max_iters": 300, "eval_interval": 1000}
    process = start(server, flags, tmp_path / "errors.txt")
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 2)
    assert stop(process, signal.SIGINT) == 128 + signal.SIGINT
    done = read(tmp_path / "out" / "checkpoint.pt")["training"]["iteration"]
    assert 2 < done < 300
    go_on = f"to resume: python train_grpo.py --init_from=resume --out_dir={tmp_path}/out"
    errors = (tmp_path / "errors.txt").read_text(encoding="utf-8")
    assert errors == f"the run ends early: {done} of 300 steps are saved; {go_on}\n"
    more = {"max_iters": done + 2, "lr_decay_iters": 300}
    run(flags, init_from="resume", **more)
    run(flags, out_dir=tmp_path / "whole", **more)
    assert same_run(tmp_path / "out", tmp_path / "whole")


def test_a_second_signal_ends_the_program_unless_torchrun_may_have_sent_it(monkeypatch):
    ours = signal.getsignal(signal.SIGTERM)
    for processes in (1, 2):
        monkeypatch.setattr(distributed, "PROCESSES", processes)
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
            assert signals.received == signal.SIGTERM
            assert (signal.getsignal(signal.SIGTERM) == ours) == (processes == 1)
        assert signal.getsignal(signal.SIGTERM) == ours


def test_killed_at_any_moment_it_resumes_bit_for_bit(server, flags, tmp_path):
    """Send kill -9 several times to a run that saves every ten steps.

    Its checkpoint always loads, and in the end it equals a run that was never killed. With KILLS=50
    it is killed 50 times.
    """
    draw = random.Random(1)
    flags = flags | {"max_iters": 10**6, "reference_mode": "ema"}
    checkpoint = tmp_path / "out" / "checkpoint.pt"
    for _ in range(int(os.environ.get("KILLS", 3))):
        before = checkpoint.read_bytes() if checkpoint.exists() else b""
        how = "resume" if before else "pretrained"
        process = start(server, flags, tmp_path / "errors.txt", init_from=how)
        if draw.random() < 0.8:  # otherwise it is killed while it starts
            wait_for(lambda: checkpoint.exists() and checkpoint.read_bytes() != before)  # noqa: B023
        time.sleep(draw.uniform(0, 0.5))
        assert stop(process, signal.SIGKILL) == -signal.SIGKILL
    more = {"max_iters": read(checkpoint)["training"]["iteration"] + 2, "lr_decay_iters": 10**6}
    run(flags, init_from="resume", **more)
    run(flags, out_dir=tmp_path / "whole", **more)
    assert same_run(tmp_path / "out", tmp_path / "whole")
