"""Check what Weights & Biases gets. If it fails, a run prints one warning and goes on."""

import json
import sys
from pathlib import Path

import pytest
from conftest import command_line

import train_grpo
from grpo.plumbing import log

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def forgetting():
    """Shut wandb down before and after each test, because it reads the environment only once."""
    wandb.teardown()
    yield
    wandb.teardown()


def run(flags, **changes):
    """Make a run that logs to wandb: -> the lines of metrics.jsonl, and evaluation.json."""
    names = {"wandb_log": "true", "wandb_project": "p", "wandb_run_name": "n"}
    train_grpo.main(command_line(flags, max_iters=2, **names, **changes))
    out = Path(flags["out_dir"])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((out / "evaluation.json").read_text())


class Recorder:
    """This stands in for what wandb.init returns, and records what a run tells it."""

    url = "http://here"

    def __init__(self, **begun):
        self.begun = begun
        self.history = {}
        self.summary = {}

    def log(self, numbers, step):
        self.history[step] = numbers

    def finish(self, exit_code):
        self.exit_code = exit_code


def test_it_gets_settings_metrics_and_the_table(flags, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(wandb, "init", lambda **begun: made.append(Recorder(**begun)) or made[0])
    lines, table = run(flags)
    (recorder,) = made
    assert (recorder.begun["project"], recorder.begun["name"]) == ("p", "n")
    assert recorder.begun["config"]["group_size"] == 4
    assert [{"iteration": step, **numbers} for step, numbers in recorder.history.items()] == lines
    assert recorder.summary == table
    assert recorder.exit_code == 0
    assert "wandb: http://here" in capsys.readouterr().out


def test_offline_it_writes_into_the_runs_folder(flags):
    run(flags)
    wandb.teardown()  # waits until all is written
    (file,) = Path(flags["out_dir"]).glob("wandb/offline-run-*/*.wandb")
    assert b"mean_reward" in file.read_bytes()


def unreachable(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    monkeypatch.setitem(log.WANDB, "init_timeout", 1)


def not_logged_in(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", "/dev/null")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)


def dying(monkeypatch):
    """Let wandb fail in the middle of the run."""

    def broken(*_, **__):
        raise ConnectionResetError("Connection reset by peer")

    monkeypatch.setattr(wandb.Run, "log", broken)


@pytest.mark.parametrize("trouble", [unreachable, not_logged_in, not_installed, dying])
def test_trouble_is_one_warning_and_the_run_goes_on(flags, monkeypatch, capfd, trouble):
    trouble(monkeypatch)
    lines, _ = run(flags)
    wandb.finish()
    shown = "".join(capfd.readouterr()).splitlines()
    warnings = [line for line in shown if "given up" in line or "wandb" in line and "ERROR" in line]
    assert len(warnings) == 1 and "the run goes on without: " in warnings[0]
    assert [line["iteration"] for line in lines] == [0, 1]
