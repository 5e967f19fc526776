"""Check what Weights & Biases gets. If it cannot start, a run prints one warning and goes on."""

import sys
from pathlib import Path

import pytest
from conftest import run

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def forgetting():
    """Shut wandb down before and after each test, because it reads the environment only once."""
    wandb.teardown()
    yield
    wandb.teardown()


def test_offline_it_writes_into_the_runs_folder(flags):
    run(flags, wandb_project="grpo", wandb_run_name="a name of mine")
    wandb.teardown()  # waits until all is written
    (file,) = Path(flags["out_dir"]).glob("wandb/offline-run-*/*.wandb")
    for written in (b"mean_reward", b"group_size", b"after, sampled", b"a name of mine"):
        assert written in file.read_bytes()


def unreachable(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")  # seconds


def not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)


class Dying:
    """A run on wandb whose process is killed after some calls."""

    url = "https://example.org"
    disabled = False

    def __init__(self, calls):
        self.left = calls

    def log(self, *_, **__):
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError("the process of wandb is gone")

    finish = log


def killed(calls):
    return lambda monkeypatch: monkeypatch.setattr(wandb, "init", lambda **_: Dying(calls))


# A run tells wandb each of its 4 steps, the table and its end.
@pytest.mark.parametrize("trouble", [unreachable, not_installed, killed(1), killed(5)])
def test_trouble_is_one_warning_and_the_run_goes_on(flags, monkeypatch, capfd, trouble):
    trouble(monkeypatch)
    _, metrics = run(flags, wandb_project="grpo")
    shown = "".join(capfd.readouterr()).splitlines()
    assert sum("wandb failed, continuing without it: " in line for line in shown) == 1
    assert len(metrics) == 4
