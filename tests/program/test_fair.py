"""Check how a variant is tuned and summed up, and the rewards of the claims."""

import sys

import pytest
import torch
from conftest import command_line, encode, read_jsonl, run, write_text

import train_grpo
from data.sums.prepare import prepare
from data.user_mistake import Mistake
from grpo.batch import make_batch
from grpo.evaluation import exact
from grpo.experiments import critic, fair, grid, ladder, rewards
from grpo.run.log import lock_folder

FIRST, SECOND = fair.CHOOSING


@pytest.fixture
def made(monkeypatch):
    """List the runs that are made: (half, β, learning rate, seed). Nothing is trained."""
    made = []

    def main(words, quiet):
        flags = dict(word[2:].split("=") for word in words if word.startswith("--"))
        half = {"choose": "choose", "val": "report"}[flags["held_out"]]
        beta, rate = float(flags["kl_beta"]), float(flags["learning_rate"])
        made.append((half, beta, rate, int(flags["seed"])))
        if rate == 1e8:
            raise FloatingPointError

    def describe(self, out_dir, half):
        _, beta, _, seed = made[-1]
        correct = {0.05: 0.5, 0.1: 0.9, 0.2: 0.91, 0.4: 0.7}[beta] - 0.05 * (
            beta == 0.2 and seed == SECOND
        )
        return {"correct": correct}

    monkeypatch.setattr(train_grpo, "main", main)
    monkeypatch.setattr(fair.Variant, "describe", describe)
    return made


def test_a_variant_is_chosen_on_one_half_and_reported_on_the_other(tmp_path, made, capsys):
    """The best one is at the edge of the grid, so it grows there. A second seed decides."""
    command = [str(tmp_path / "out"), "config/rule.py", "--kl_beta=0.05,0.1,0.2"]
    command += ["--learning_rate=1e-3,1e8", "--seeds=1-2"]
    for _ in range(2):  # the second time nothing is made again
        fair.main(command)
    grid = [("choose", b, r, FIRST) for b in (0.05, 0.1, 0.2) for r in (1e-3, 1e8)]
    beyond = [("choose", 0.4, 1e-3, FIRST), ("choose", 0.2, 1e-14, FIRST)]
    assert made[:8] == grid + beyond
    assert {(beta, seed) for _, beta, _, seed in made[8:11]} == {(0.1, SECOND), (0.2, SECOND)}
    assert made[11:] == [("report", 0.1, 1e-3, seed) for seed in (1, 2)]
    assert "kl_beta=0.1, learning_rate=0.001: correct 0.900" in capsys.readouterr().out
    first, diverged, third, *_ = read_jsonl(tmp_path / "out" / "runs.jsonl")
    assert (first["correct"], diverged.get("correct"), third["correct"]) == (0.5, None, 0.9)


def test_one_candidate_is_only_reported_and_after_ctrl_c_the_same_command_goes_on(
    tmp_path, made, monkeypatch
):
    command = [str(tmp_path / "out"), "config/rule.py", "--seeds=1,1234567"]
    command += ["--kl_beta=0.1", "--learning_rate=1e-3"]
    main = train_grpo.main

    def interrupted(*given, **options):
        if made:
            sys.exit(130)
        main(*given, **options)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train_grpo, "main", interrupted)
        fair.main(command)
    fair.main(command)
    assert [(half, seed) for half, *_, seed in made] == [("report", 1), ("report", 1234567)]


def test_what_is_refused(tmp_path, made, monkeypatch):
    """Runs of other settings or other code never stand in one folder."""
    command = [str(tmp_path / "out"), "config/rule.py", "--kl_beta=0.1", "--learning_rate=1e-3"]
    command += ["--seeds=1"]
    fair.main(command)
    refused = {
        "--num_iterations=1": "has runs with other words and settings",
        "--seed=3": "fair sets seed itself",
        f"--seeds={FIRST}": "which choose",
        "--top_k=1": "without a truncation",
        "config/latent.py": "fair is for sums",
    }
    for flag, line in refused.items():
        with pytest.raises(Mistake, match=line):
            fair.main([*command, flag])
    monkeypatch.setattr(fair, "fingerprint", lambda config: "other code")
    with pytest.raises(Mistake, match="has runs with other made_by"):
        fair.main(command)


def test_a_run_that_another_program_is_making_is_left_alone(tmp_path):
    variant = fair.Variant(tmp_path, ["config/rule.py", "--max_iters=1", "--eval_inputs=2"], {})
    lock = lock_folder(variant.folder_of("report", {}, 1))
    with lock, pytest.raises(Mistake, match="is in use by another run"):
        variant.run("report", {}, 1)


def test_what_made_a_students_runs_includes_how_it_learns(tmp_path, monkeypatch):
    """The code of pretraining isn't a part of other runs."""
    words = "supervised any --rate=1e-3".split()
    before = fair.Variant(tmp_path, words, {}).made_by()
    for name in fair.TEACHING:
        write_text(tmp_path / name, "x = 1")
    monkeypatch.setattr(fair, "PROJECT", tmp_path)
    assert fair.Variant(tmp_path, words, {}).made_by() != before


def test_a_run_is_summed_up_by_its_exact_figures(world, flags, tmp_path, monkeypatch):
    prepare(tmp_path / "sums", 2)
    small = {
        "block_size": 8,
        "generator_checkpoint": str(world / "digits.pt"),
        "masking": "columns",
    }
    small |= {"dataset": str(tmp_path / "sums"), "judge_checkpoint": "", "reward": "correct"}
    run(flags, **small, top_p=1.0, max_iters=12)
    monkeypatch.setattr(fair, "INPUTS", 50)
    variant = fair.Variant(tmp_path, command_line(small), {})
    found = variant.describe(tmp_path / "out", "report")
    assert found["pass"][0] == pytest.approx(found["correct"], rel=1e-6)
    for k in exact.PASS_AT:
        assert found["pass"][fair.K.index(k)] == pytest.approx(found[f"pass@{k}"], rel=1e-6)


def test_the_rewards_of_the_claims():
    texts = "417+471=888", "407+471=888", "416+471=888", "4a7+471=888"  # correct, off by 10, wrong
    completions = encode(*texts)[None]  # (1,4,T)
    mask = torch.ones(1, 11, dtype=torch.bool)
    batch = make_batch(completions[:, 0], mask, 4, (1, 1))
    want = {"successes": [1, 0, 0, 0], "failures": [0, -1, -1, -1]}
    want["loose"] = [1, 1, 0, 0]
    for name, values in want.items():
        assert getattr(rewards, name)(completions, batch).tolist() == [values]


def test_a_word_without_an_e():
    texts = "to the on", "to tho on", "to zqx on", "to was on"  # an e, a fragment, no word, paid
    completions = encode(*texts)[None]  # (1,4,T)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0]]).bool()
    batch = make_batch(completions[:, 0], mask, 4, (1, 1))
    want = [0.0, float("tho" in rewards.words_of_text()), 0.0, 1.0]
    assert rewards.without_e(completions, batch).tolist() == [want]


def test_the_critic_learns_only_from_training():
    tokens = encode("417+471=888")
    batch = make_batch(tokens, tokens == tokens[0, 0], 1, (1,))
    first = critic.successes(tokens[:, None], batch)  # it expects 0 of everything
    with torch.no_grad():
        seconds = [critic.successes(tokens[:, None], batch) for _ in range(2)]
    assert first == 1 > seconds[0] == seconds[1]


def test_every_command_of_the_ladder_and_the_grid_is_understood(tmp_path):
    for command in [*ladder.RUNGS.values(), *ladder.LONGER.values(), *grid.cells().values()]:
        variant = fair.Variant(tmp_path, command.split(), {})
        assert variant.config.dataset == "sums"
