"""Check that a resumed run equals the run that never stopped, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import run, same

import train_grpo

REWARD = """
import torch

def late(completions, masked, mask, decode):
    return (completions > 5).float().mean(dim=-1) + torch.rand(())
"""
CUT_SHORT = """{"iteration": 3, "written": "after the last checkpoint, before the kill"}
{"iteration": 4, "cut sho"""
VARIANTS = [
    {},
    {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "dapo"},
    {"reference_mode": "ema", "minibatch_size": 2, "num_iterations": 2},
    {"reference_mode": "periodic", "reference_update_freq": 2, "xtc_probability": 0.5},
    {"reward": "judge,{folder}/r.py:late:0.5", "credit": "run", "top_entropy_quantile": 0.5},
    {"generator_checkpoint": "{world}/latent.pt", "reference_mode": "ema", "num_iterations": 2},
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "r.py").write_text(REWARD)
    return tmp_path


def resume(*flags):
    train_grpo.main(["--init_from=resume", *flags])


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_n_steps_and_n_more_are_2n(flags, folder, world, changes):
    """Weights, moments, reference and metrics are those of one run of 2n steps.

    If a run was killed, metrics.jsonl may hold lines of steps after its checkpoint.
    """
    changes = {"eval_inputs": 1, "lr_decay_iters": 6} | changes
    changes = {
        name: str(value).format(folder=folder, world=world) for name, value in changes.items()
    }
    whole, metrics = run(flags, out_dir=folder / "whole", max_iters=6, **changes)
    halves = {"out_dir": folder / "halves", **changes}
    run(flags, max_iters=3, **halves)
    with open(folder / "halves" / "metrics.jsonl", "a") as file:
        file.write(CUT_SHORT)
    again, metrics_again = run(flags, max_iters=6, init_from="resume", **halves)
    assert metrics == metrics_again
    for content in (whole, again):
        del content["training"]["config"]
    assert same(whole, again)


def test_settings_come_from_the_checkpoint_but_for_what_is_given_again(flags, folder, capsys):
    run(flags, kl_beta=0.3, max_iters=2)
    resume(f"--out_dir={folder}/out", "--max_iters=4", "--top_p=0.9")
    settings = json.loads((folder / "out" / "config.json").read_text())
    assert (settings["kl_beta"], settings["top_p"], settings["max_iters"]) == (0.3, 0.9, 4)
    said = capsys.readouterr().out
    changes = "top_p 0.95 -> 0.9, max_iters 2 -> 4"
    assert f"{folder}/out goes on from step 2 with {changes}\n" in said


def test_a_copied_run_goes_on_in_its_own_folder(flags, folder):
    run(flags, max_iters=2)
    shutil.copytree(folder / "out", folder / "copy")
    before = {path: path.read_bytes() for path in (folder / "out").iterdir()}
    resume(f"--out_dir={folder}/copy", "--max_iters=3")
    assert {path: path.read_bytes() for path in (folder / "out").iterdir()} == before
    assert len((folder / "copy" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_that_is_done_says_what_to_do(flags, folder, capsys):
    run(flags)
    with pytest.raises(SystemExit) as end:
        resume(f"--out_dir={folder}/out")
    assert end.value.code == 2
    line = "out is at step 4 already, and max_iters allows no more; set a larger max_iters, or"
    assert line in capsys.readouterr().err


def test_a_reward_of_the_users_own_must_be_given_again(flags, folder, capsys):
    reward = f"judge,{folder}/r.py:late"
    run(flags, reward=reward, max_iters=2)
    with pytest.raises(SystemExit) as end:
        resume(f"--out_dir={folder}/out", "--max_iters=3")
    assert end.value.code == 2
    assert f"if you trust the file, add --reward={reward}\n" in capsys.readouterr().err
    resume(f"--out_dir={folder}/out", "--max_iters=3", f"--reward={reward}")


def test_the_same_command_gives_the_same_run_and_another_seed_another(flags, folder):
    one, metrics = run(flags, out_dir=folder / "a")
    again, metrics_again = run(flags, out_dir=folder / "b")
    other, other_metrics = run(flags, out_dir=folder / "c", seed=2)
    assert metrics == metrics_again != other_metrics
    assert same(one["weights"], again["weights"])
    tables = [(Path(folder) / name / "evaluation.json").read_text() for name in "ab"]
    assert tables[0] == tables[1]


def test_the_optimizers_settings_may_be_given_again(flags):
    run(flags, max_iters=2)
    again, _ = run(flags, max_iters=3, init_from="resume", weight_decay=0.3, beta2=0.8)
    decayed, others = again["training"]["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert decayed["betas"] == others["betas"] == (0.9, 0.8)
