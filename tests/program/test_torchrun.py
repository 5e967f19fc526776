"""Check that N processes compute what one does with N micro-batches, and end together."""

import os
import signal
import socket
import sys
import time

import pytest
from conftest import command_line, figures, run

import train_grpo
from grpo import distributed
from grpo.run.checkpoint import read

SHARED = {
    "max_iters": 2,
    "eval_inputs": 2,
    "scale_rewards": "batch",
    "top_entropy_quantile": 0.5,
    "num_iterations": 2,
    "reward": "judge,valid",
    "reference_mode": "ema",
}


def process(rank, port, runs, output):
    """Make these runs one after the other, as the process `rank` of two that torchrun starts."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    distributed.RANK = rank  # the server has read the environment already
    distributed.PROCESSES = 2
    sys.stdout = sys.stderr = open(output, "a", buffering=1, encoding="utf-8")
    for arguments in runs:
        train_grpo.main(arguments)


def start_two(server, runs, output):
    """Start two processes that make these runs together: -> the processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [
        server.Process(target=process, args=(rank, port, runs, output), daemon=True)
        for rank in (0, 1)
    ]
    for one in both:
        one.start()
    return both


def end(one):
    """Wait for the end of a process: -> its exit code."""
    one.join(120)
    return one.exitcode


def distance(a, b):
    """Measure how far two models' weights are apart."""
    return sum((a[name] - b[name]).square().sum() for name in a).sqrt()


def test_two_processes_are_one_with_two_micro_batches(flags, world, tmp_path, server):
    """Up to rounding, two processes give the weights and metrics of one with two micro-batches.

    For dapo and for the latent, one batch of double size gives them too.
    """
    losses = ("grpo", "dapo", "dr_grpo", "sum")
    own = {loss: SHARED | {"loss_type": loss, "out_dir": tmp_path / loss} for loss in losses}
    latent = str(world / "latent.pt")
    own["latent"] = SHARED | {"generator_checkpoint": latent, "out_dir": tmp_path / "latent"}
    runs = [command_line(flags, **each) for each in own.values()]
    output = tmp_path / "out.txt"
    both = start_two(server, runs, output)
    alone = [(loss, {"gradient_accumulation_steps": 2}) for loss in own]
    alone += [(loss, {"batch_size": 8}) for loss in ("dapo", "latent")]
    made = [run(flags, **own[loss] | how | {"out_dir": tmp_path / "one"}) for loss, how in alone]
    assert [end(one) for one in both] == [0, 0]
    printed = output.read_text(encoding="utf-8")
    assert printed.count("next:") == len(own)  # only one process prints
    for case, (one, metrics) in zip(alone, made):
        loss, _ = case
        base = read((flags | own[loss])["generator_checkpoint"])["weights"]
        saved = read(tmp_path / loss / "checkpoint.pt")
        moved = distance(one["weights"], base)
        assert distance(one["weights"], saved["weights"]) < 1e-4 * moved, case
        for a, b in zip(figures(tmp_path / loss), metrics, strict=True):
            assert a == pytest.approx(b, rel=1e-3, abs=1e-5), case


def test_no_process_outlives_another(flags, tmp_path, server):
    """A signal reaches only one process, and twice, as torchrun may send it. Both end alike.

    They end after the same step, which is saved.
    """
    endless = command_line(flags, max_iters=10**5, eval_interval=10**6)
    output = tmp_path / "out.txt"
    both = start_two(server, [endless], output)
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert all(one.is_alive() for one in both), output.read_text(encoding="utf-8")
        time.sleep(0.05)
    for _ in range(2):
        os.kill(both[1].pid, signal.SIGTERM)
    assert [end(one) for one in both] == [128 + signal.SIGTERM] * 2
    printed = output.read_text(encoding="utf-8")
    assert printed.count("the run ends early: ") == 1
    done = read(tmp_path / "out" / "checkpoint.pt")["training"]["iteration"]
    assert f"{done} of 100000 steps are saved" in printed
    assert len(figures(tmp_path / "out")) == done
