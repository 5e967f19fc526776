"""Check that a resumed run equals the run that never stopped, bit for bit."""

import shutil
from pathlib import Path

import pytest
from conftest import contents, figures, read_json, run, same, write_text

import train_grpo
from data.user_mistake import Mistake
from grpo.run.checkpoint import read
from grpo.run.log import open_folder

REWARD = """
def late(completions, batch):
    return (completions > 5).float().mean(dim=-1) + batch.noise
"""
# A kill leaves lines of steps after the last checkpoint, and a half line.
LATER = b'{"iteration": 3, "written": "later"}\n{"iteration": 4, "cut sho'
VARIANTS = [
    {},
    {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "dapo"},
    {"reference_mode": "ema", "minibatch_size": 2, "num_iterations": 2},
    {"reference_mode": "periodic", "reference_update_freq": 2, "xtc_probability": 0.5},
    {"reward": "judge,{folder}/r.py:late:0.5", "top_entropy_quantile": 0.5},
    {"generator_checkpoint": "{world}/latent.pt", "reference_mode": "ema", "num_iterations": 2},
    {"dtype": "bfloat16", "gradient_checkpointing": True, "repetition_penalty": 1.2},
]


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path / "r.py", REWARD)
    return tmp_path


def resume(*flags):
    train_grpo.main(["--init_from=resume", *flags])


@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_n_steps_and_n_more_are_2n(flags, folder, world, given):
    """Weights, moments, reference, metrics and replay are those of one run of 2n steps.

    If a run was killed, its .jsonl files may hold lines of steps after its checkpoint.
    """
    changes = {"eval_inputs": 1, "lr_decay_iters": 6} | given
    changes = {
        name: str(value).format(folder=folder, world=world) for name, value in changes.items()
    }
    whole, metrics = run(flags, out_dir=folder / "whole", max_iters=6, **changes)
    halves = {"out_dir": folder / "halves", **changes}
    run(flags, max_iters=3, **halves)
    for name in ("metrics.jsonl", "snapshots.jsonl"):
        with open(folder / "halves" / name, "ab") as file:
            file.write(LATER)
    again, metrics_again = run(flags, max_iters=6, init_from="resume", **halves)
    assert metrics == metrics_again
    shown = [(folder / name / "snapshots.jsonl").read_bytes() for name in ("whole", "halves")]
    assert shown[0] == shown[1]
    for content in (whole, again):
        del content["training"]["config"], content["training"]["made_by"]
    assert same(whole, again)


def test_settings_come_from_the_checkpoint_but_for_what_is_given_again(flags, folder):
    """A copied run goes on in its own folder."""
    run(flags, kl_beta=0.3, max_iters=2)
    shutil.copytree(folder / "out", folder / "copy")
    before = contents(folder / "out")
    resume(f"--out_dir={folder}/copy", "--max_iters=4", "--top_p=0.9")
    assert contents(folder / "out") == before
    settings = read_json(folder / "copy" / "config.json")
    assert (settings["kl_beta"], settings["top_p"], settings["max_iters"]) == (0.3, 0.9, 4)
    with pytest.raises(Mistake, match="max_iters=1, but 2 steps are done"):
        resume(f"--out_dir={folder}/out", "--max_iters=1")
    assert contents(folder / "out") == before


def test_a_moved_reference_stays_and_the_table_compares_with_the_base(flags, folder):
    """The resumed run has a static reference, and its base model is still the one of before."""
    moving = {"reference_mode": "periodic", "reference_update_freq": 2, "max_iters": 2}
    first, _ = run(flags, **moving)
    table = read_json(folder / "out" / "evaluation.json")
    resume(f"--out_dir={folder}/out", "--max_iters=3", "--reference_mode=static")
    again = read_json(folder / "out" / "evaluation.json")
    assert again["before, sampled"] == table["before, sampled"]
    kept = read(folder / "out" / "checkpoint.pt")["training"]["reference"]
    assert same(kept, first["training"]["reference"]) and same(kept, first["weights"])


def test_a_reference_that_is_named_anew_replaces_the_saved_one(flags, world):
    before, _ = run(flags)
    other = world / "other.pt"
    for new in (f"--reference_checkpoint={other}", "--max_iters=6"):  # and it stays
        resume(f"--out_dir={flags['out_dir']}", "--max_iters=5", new)
        after = read(Path(flags["out_dir"]) / "checkpoint.pt")
        assert same(after["training"]["reference"], read(other)["weights"])
        assert not same(after["weights"], before["weights"])


def test_a_run_that_is_done_makes_its_table_again_and_one_with_a_file_says_what_to_do(
    flags, folder
):
    reward = f"judge,{folder}/r.py:late"
    run(flags, reward=reward)
    with pytest.raises(Mistake, match=f"if you trust the file, add --reward={reward}$"):
        resume(f"--out_dir={folder}/out", "--max_iters=5")
    table = folder / "out" / "evaluation.json"
    before, steps = table.read_text(encoding="utf-8"), figures(folder / "out")
    table.unlink()
    resume(f"--out_dir={folder}/out", f"--reward={reward}")
    assert table.read_text(encoding="utf-8") == before and figures(folder / "out") == steps


def test_the_same_command_gives_the_same_run_and_another_seed_another(flags, folder):
    one, metrics = run(flags, out_dir=folder / "a")
    again, metrics_again = run(flags, out_dir=folder / "b")
    _, other_metrics = run(flags, out_dir=folder / "c", seed=2)
    assert metrics == metrics_again != other_metrics
    assert same(one["weights"], again["weights"])
    tables = [(folder / name / "evaluation.json").read_text(encoding="utf-8") for name in "ab"]
    assert tables[0] == tables[1]


def test_a_resumed_run_drops_what_was_measured_of_the_shorter_one(tmp_path):
    measured = {"evaluation.json", "completions.jsonl", "replay.html"}
    kept = {"config.json", "metrics.jsonl", "snapshots.jsonl", "checkpoint.pt", "run.lock"}
    for name in measured | kept:
        (tmp_path / name).touch()
    open_folder(tmp_path, 4).close()
    assert {path.name for path in tmp_path.iterdir()} == kept
