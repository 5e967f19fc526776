"""Check what Weights & Biases gets."""

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
