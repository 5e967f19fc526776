"""A run that is killed, starved or fed nonsense ends in a clear line and a loadable checkpoint. KILLS=50 and STEPS=20000 make the long ones as long as that."""

import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train_grpo
from grpo.plumbing.checkpoint import read
from tests.conftest import command_line
from tests.test_train import run, same


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
    """A run whose stderr is a file, on a disk that takes no file of more than `limit` bytes once everything is set up."""
    loop = train_grpo.train_loop

    def on_a_full_disk(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return loop(*args)

    train_grpo.train_loop, sys.stderr = (
        on_a_full_disk if limit else loop,
        open(errors, "w", buffering=1),
    )
    train_grpo.main(arguments)


def wait_for(condition):
    for _ in range(20000):
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


def figures(folder):
    return [
        {k: v for k, v in json.loads(line).items() if not k.endswith("_ms")}
        for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
    ]


def same_run(a, b):
    """Two folders hold the same run, bit for bit: everything in the checkpoint but the settings, and every figure but the times."""
    x, y = (read(Path(folder) / "checkpoint.pt") for folder in (a, b))
    x["training"].pop("config"), y["training"].pop("config")
    return same(x, y) and figures(a) == figures(b)


def test_killed_at_any_moment_it_resumes_bit_for_bit(server, flags, tmp_path):
    """kill -9 again and again, in one folder, of a run that saves every step: the checkpoint always loads, and the end is that of a run never killed."""
    kills, out, draw = int(os.environ.get("KILLS", 5)), Path(flags["out_dir"]), random.Random(1)
    flags = flags | {
        "max_iters": 60 * kills,
        "eval_interval": 10**6,
        "reference_mode": "ema",
        "num_iterations": 2,
    }
    run(flags, out_dir=tmp_path / "whole")
    for _ in range(kills):
        saved = (out / "checkpoint.pt").exists()
        life, before = (
            Run(server, flags, save_interval=1, init_from="resume" if saved else "pretrained"),
            (out / "checkpoint.pt").read_bytes() if saved else b"",
        )
        if draw.random() < 0.8:  # else while it starts
            wait_for(
                lambda: (
                    (out / "checkpoint.pt").exists()
                    and (out / "checkpoint.pt").read_bytes() != before
                )
            )
        time.sleep(draw.uniform(0, 0.5))
        assert life.kill(signal.SIGKILL)[0] == -signal.SIGKILL
        if (out / "checkpoint.pt").exists():
            assert 0 < read(out / "checkpoint.pt")["training"]["iteration"] < flags["max_iters"]
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
        and f"stopped by {number.name} after step {done - 1}; --init_from=resume goes on" in line
        and 2 < done < 300
    )
    run(flags, init_from="resume", max_iters=done + 2, lr_decay_iters=300)
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
    """Saving, and writing a line of metrics: one line, an exit code, and the checkpoint of before."""
    flags, out = flags | {"max_iters": 6, "lr_decay_iters": 6}, Path(flags["out_dir"])
    run(flags, max_iters=2)
    whole, size = (out / "checkpoint.pt").read_bytes(), (out / "metrics.jsonl").stat().st_size
    for limit in (len(whole) - 1, size + 100):
        code, line = Run(server, flags, limit, init_from="resume").end()
        assert code == 1 and "File too large" in line and "--init_from=resume goes on" in line
        assert (out / "checkpoint.pt").read_bytes() == whole and not list(out.glob("*.tmp"))
    run(flags, init_from="resume")


def test_a_new_run_in_an_old_folder(flags):
    """What was saved there is kept beside; what would be taken for the new run's is gone; what is not the program's is not touched."""
    out = Path(flags["out_dir"])
    run(flags)
    old = (out / "checkpoint.pt").read_bytes()
    (out / "mine.tmp").write_text("a file of the user's")
    with pytest.raises(SystemExit):
        run(flags, seed=2, learning_rate=1e30, grad_clip=0)
    assert (out / "checkpoint_prev.pt").read_bytes() == old and (out / "mine.tmp").exists()
    assert not (out / "checkpoint.pt").exists() and not (out / "evaluation.json").exists()


def test_a_damaged_checkpoint_names_the_one_before(flags, capsys):
    flags, out = flags | {"lr_decay_iters": 6}, Path(flags["out_dir"])
    run(flags, save_interval=2)
    (out / "checkpoint.pt").write_bytes((out / "checkpoint.pt").read_bytes()[:-100])
    with pytest.raises(SystemExit):
        run(flags, init_from="resume", max_iters=6)
    assert (
        f"damaged or no checkpoint; {out}/checkpoint_prev.pt is the one saved before it: rename it to checkpoint.pt"
        in capsys.readouterr().err
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
        and "metrics.jsonl has a line that is not JSON; take it out" in capsys.readouterr().err
    )
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


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
    """The step and the tensor are named; weights and moments are those of the step before; the last checkpoint stays."""
    calls, before = [], []
    real = train_grpo.grpo_step

    def step(generate, refer, rewards, optimizer, *rest):
        calls.append(1)
        if len(calls) < 3:
            return real(generate, refer, rewards, optimizer, *rest)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before.extend(
            x.clone() for p in parameters for x in (p.detach(), *optimizer.state[p].values())
        )
        spoil = lambda model: lambda tokens: model(tokens).index_fill(0, torch.tensor([0]), value)  # noqa: E731
        if bad == "gradient":
            parameters[0].register_hook(lambda gradient: gradient.fill_(value))
        if bad == "judge":
            monkeypatch.setattr(
                rewards, "judge", lambda tokens: torch.full(tokens.shape, float("nan"))
            )
        result = real(
            spoil(generate) if bad == "generator" else generate,
            spoil(refer) if bad == "reference" else refer,
            rewards,
            optimizer,
            *rest,
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                before, (x for p in parameters for x in (p.detach(), *optimizer.state[p].values()))
            )
        )
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
    with pytest.raises(SystemExit) as stop:
        run(flags, learning_rate=1e30, grad_clip=0)
    assert (
        stop.value.code == 1
        and "step 1: not finite: the generator's logits (entropy=nan); begin anew with a lower learning_rate"
        in capsys.readouterr().err
    )


def test_a_reward_that_fails_on_the_way_is_one_line(flags, tmp_path, capsys):
    (tmp_path / "r.py").write_text(
        "calls = []\n\ndef tired(completions, masked, mask, decode):\n    calls.append(1)\n    return [[1 / (len(calls) < 4)] * completions.shape[1]] * len(completions)"
    )
    with pytest.raises(SystemExit) as stop:
        run(flags | {"group_size": 4}, reward=f"judge,{tmp_path}/r.py:tired", save_interval=1)
    assert (
        stop.value.code == 1
        and "train_grpo.py: reward tired" in capsys.readouterr().err.splitlines()[-1]
    )


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
    return [
        int(p.name)
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and f"PPid:\t{pid}\n" in (p / "status").read_text()
    ]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("trouble", ["a rank is killed", "the first rank cannot save"])
def test_ranks_end_together(flags, trouble):
    out = Path(flags["out_dir"])
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
        "train_grpo.py",
    ]
    if trouble == "the first rank cannot save":
        (out / "checkpoint.pt").mkdir(parents=True)
    process = subprocess.Popen(
        [*torchrun, *command_line(flags, max_iters=10**5, eval_interval=10**6, save_interval=3)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    wait_for(
        lambda: (
            process.poll() is not None
            or (out / "metrics.jsonl").exists()
            and (out / "metrics.jsonl").stat().st_size
        )
    )
    ranks = children(process.pid)
    if trouble == "a rank is killed":
        os.kill(ranks[-1], signal.SIGKILL)
    assert process.wait(60) != 0 and not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_a_long_run_stays_flat(flags):
    """Memory and file handles do not grow, metrics.jsonl is complete."""
    steps, seen, real = int(os.environ.get("STEPS", 150)), [], train_grpo.fetch

    def fetch(pending):
        seen.append(
            (
                int(Path("/proc/self/statm").read_text().split()[1]) * 4,
                len(os.listdir("/proc/self/fd")),
            )
        )  # kB, handles
        return real(pending)

    train_grpo.fetch = fetch
    try:
        run(flags, max_iters=steps, save_interval=steps // 3, eval_interval=steps)
    finally:
        train_grpo.fetch = real
    print("kB and handles:", seen[steps // 10], seen[steps // 2], seen[-1])
    assert [line["iteration"] for line in figures(flags["out_dir"])] == list(range(steps))
    assert seen[-1][1] <= seen[steps // 10][1] and seen[-1][0] < 1.1 * seen[steps // 10][0] + 20000
