"""Stop or kill a run in a process of its own, and check what it leaves."""

import os
import random
import signal
import sys
import time
from pathlib import Path

from conftest import command_line, figures, run, same, write_text

import train_grpo
from grpo.run.checkpoint import read

SLOW = """
import os, time

def slow(completions, batch):
    if len(completions) == 4:  # not the trial at the start
        os.mkdir("{begun}")
        time.sleep(60)
    return completions.float().mean(dim=-1)
"""


def child(arguments, errors):
    """Run the program with its stderr written to the file `errors`."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8")
    train_grpo.main(arguments)


def wait_for(condition):
    for _ in range(20000):
        if condition():
            return
        time.sleep(0.003)
    raise TimeoutError


class Background:
    """The program in a process of its own."""

    def __init__(self, server, flags, **changes):
        self.out = Path((flags | changes)["out_dir"])
        self.errors = self.out.with_name("errors.txt")
        arguments = (command_line(flags, **changes), self.errors)
        self.process = server.Process(target=child, args=arguments, daemon=True)
        self.process.start()

    def send(self, number):
        os.kill(self.process.pid, number)
        return self

    def end(self):
        """Wait for the end: -> the exit code, and the text on stderr."""
        self.process.join(60)
        return self.process.exitcode, self.errors.read_text(errors="replace", encoding="utf-8")


def same_run(a, b):
    """Tell whether two folders hold the same run bit for bit, apart from settings and times."""
    contents = [read(Path(folder) / "checkpoint.pt") for folder in (a, b)]
    for content in contents:
        del content["training"]["config"]
    return same(*contents) and figures(a) == figures(b)


def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(server, flags, tmp_path):
    """Here it is Ctrl-C. test_run.py sends SIGTERM during the last step."""
    flags = flags | {"max_iters": 300, "eval_interval": 1000}
    background = Background(server, flags)
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 2)
    code, errors = background.send(signal.SIGINT).end()
    done = read(tmp_path / "out" / "checkpoint.pt")["training"]["iteration"]
    assert code == 128 + signal.SIGINT
    assert 2 < done < 300
    assert errors.count("finishing this step; press Ctrl-C again to stop now") == 1
    go_on = f"to resume: python train_grpo.py --init_from=resume --out_dir={tmp_path}/out"
    last = errors.splitlines()[-1]
    assert last == f"the run ends early: {done} of 300 steps are saved; {go_on}"
    more = {"max_iters": done + 2, "lr_decay_iters": 300}
    run(flags, init_from="resume", **more)
    run(flags, out_dir=tmp_path / "whole", **more)
    assert same_run(tmp_path / "out", tmp_path / "whole")


def test_a_second_signal_stops_at_once(server, flags, tmp_path):
    begun = tmp_path / "begun"
    write_text(tmp_path / "slow.py", SLOW.format(begun=begun))
    slow = Background(server, flags, reward=f"judge,{tmp_path}/slow.py:slow")
    wait_for(begun.exists)
    slow.send(signal.SIGTERM)
    wait_for(lambda: "again to stop" in slow.errors.read_text(encoding="utf-8"))
    assert slow.process.is_alive()
    assert slow.send(signal.SIGTERM).end()[0] == -signal.SIGTERM


def test_killed_at_any_moment_it_resumes_bit_for_bit(server, flags, tmp_path):
    """Send kill -9 several times to a run that saves every step.

    Its checkpoint always loads, and in the end it equals a run that was never killed. With KILLS=50
    it is killed 50 times.
    """
    draw = random.Random(1)
    flags = flags | {"max_iters": 10**6, "reference_mode": "ema"}
    checkpoint = tmp_path / "out" / "checkpoint.pt"
    for _ in range(int(os.environ.get("KILLS", 3))):
        before = checkpoint.read_bytes() if checkpoint.exists() else b""
        start = "resume" if before else "pretrained"
        life = Background(server, flags, eval_interval=1, init_from=start)
        if draw.random() < 0.8:  # otherwise it is killed while it starts
            wait_for(lambda: checkpoint.exists() and checkpoint.read_bytes() != before)  # noqa: B023
        time.sleep(draw.uniform(0, 0.5))
        assert life.send(signal.SIGKILL).end()[0] == -signal.SIGKILL
    more = {"max_iters": read(checkpoint)["training"]["iteration"] + 2, "lr_decay_iters": 10**6}
    run(flags, init_from="resume", **more)
    run(flags, out_dir=tmp_path / "whole", **more)
    assert same_run(tmp_path / "out", tmp_path / "whole")
