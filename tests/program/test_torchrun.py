"""Check that N processes compute what one does with N micro-batches, and end together."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import command_line, figures, run

import train_grpo
from grpo.distributed import join_processes
from grpo.plumbing.checkpoint import read
from grpo.plumbing.network import pick_device

TORCHRUN = "-m torch.distributed.run --nproc_per_node=2 --rdzv_backend=c10d"
TORCHRUN = [sys.executable, *TORCHRUN.split(), "--rdzv_endpoint=localhost:0"]
SHARED = {
    "max_iters": 2,
    "eval_inputs": 2,
    "scale_rewards": "batch",
    "top_entropy_quantile": 0.5,
    "num_iterations": 2,
    "credit": "word",
    "reward": "judge,valid_words",
    "reference_mode": "ema",
}


def process(rank, port, runs, output):
    """Make these runs one after the other, in the environment that torchrun sets for `rank`."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.stdout = open(output, "a", encoding="utf-8")
    for arguments in runs:
        train_grpo.main(arguments)


def distance(a, b):
    """Measure how far two models' weights are apart."""
    return sum((a[name] - b[name]).square().sum() for name in a).sqrt()


def test_two_processes_are_one_with_two_micro_batches(flags, world, tmp_path, server):
    """Up to rounding, two processes give the weights and metrics of one with two micro-batches.

    For dapo and for the latent, one batch of double size gives them too.
    """
    losses = ("grpo", "dapo", "bnpo", "dr_grpo", "sum")
    own = {loss: SHARED | {"loss_type": loss, "out_dir": tmp_path / loss} for loss in losses}
    latent = str(world / "latent.pt")
    own["latent"] = SHARED | {"generator_checkpoint": latent, "out_dir": tmp_path / "latent"}
    runs = [command_line(flags, **each) for each in own.values()]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [
        server.Process(target=process, args=(rank, port, runs, tmp_path / "out.txt"), daemon=True)
        for rank in (0, 1)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert [one.exitcode for one in both] == [0, 0]
    assert (tmp_path / "out.txt").read_text(encoding="utf-8").count("next:") == len(
        own
    )  # only one process prints
    for loss, each in own.items():
        base = read((flags | each)["generator_checkpoint"])["weights"]
        have = read(tmp_path / loss / "checkpoint.pt")["weights"]
        batches = [{"gradient_accumulation_steps": 2}]
        if loss in ("dapo", "latent"):
            batches.append({"batch_size": 8})
        for batch in batches:
            one, metrics = run(flags, **each | batch | {"out_dir": tmp_path / "one"})
            assert distance(one["weights"], have) < 1e-4 * distance(one["weights"], base), each
            for a, b in zip(figures(tmp_path / loss), metrics, strict=True):
                assert a == pytest.approx(b, rel=1e-3, abs=1e-5), each


def test_the_current_gpu_is_set_where_processes_join(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = pick_device("cuda:1")
    assert not chosen
    join_processes(device)
    assert chosen == [torch.device("cuda:1")]


@pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="needs Linux's /proc")
def test_no_process_outlives_another(flags, tmp_path):
    """If torchrun gets SIGTERM, both processes end after the same step, which is saved."""
    endless = command_line(flags, max_iters=10**5, eval_interval=10**6, compile="false")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    launcher = subprocess.Popen([*TORCHRUN, "train_grpo.py", *endless], **pipes)
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    ranks = (
        Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        .read_text(encoding="utf-8")
        .split()
    )
    assert len(ranks) == 2
    os.kill(launcher.pid, signal.SIGTERM)
    _, err = launcher.communicate()
    assert launcher.returncode
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert err.count("the run ends early: ") == 1
    assert (tmp_path / "out" / "checkpoint.pt").exists()
