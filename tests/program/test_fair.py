"""Check how a variant is tuned and summed up, and the rewards of grpo/claims.md."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BLANK, encode, figures, make_batch, run

from data.sums.prepare import prepare
from data.vocabulary import decode
from grpo.evaluation import exact
from grpo.tools import fair, rewards, supervised


@pytest.fixture
def made(monkeypatch):
    """List the runs that are made, (dataset, seed, β, learning rate), and don't train them."""
    made = []

    def train(arguments, quiet):
        config, *flags = arguments
        given = dict(flag.removeprefix("--").split("=") for flag in flags)
        seed, beta, rate = int(given["seed"]), given["kl_beta"], given.get("learning_rate")
        made.append((given["dataset"], seed, beta, rate))
        correct = {"0.1": 0.5, "0.2": 0.9, "0.3": 0.91, "0.4": 0.7}[beta]
        correct -= 0.05 * (beta == "0.3" and seed == fair.UNREPORTED[1]) + 0.2 * (rate == "2.0")
        row = json.dumps({"after, sampled": {"correct": correct}})
        Path(given["out_dir"]).mkdir(parents=True)
        Path(given["out_dir"], "evaluation.json").write_text(row, encoding="utf-8")

    monkeypatch.setattr(fair, "train", train)
    monkeypatch.setattr(fair, "describe", lambda out_dir: {"correct": 0.9})
    return made


def test_close_candidates_are_decided_by_a_second_seed_and_then_reported(tmp_path, made, capsys):
    """Without it the β of 0.3 would win. A second time nothing is run again."""
    first, second = fair.UNREPORTED
    command = [str(tmp_path / "out"), "config/rule.py", "--betas=.1,.2,.3,.4", "--rates=1,2"]
    for _ in range(2):
        fair.main([*command, "--seeds=1,2"])
    choose = [("sums_choose", first, beta, None) for beta in ("0.1", "0.2", "0.3", "0.4")]
    choose += [("sums_choose", second, beta, None) for beta in ("0.2", "0.3")]
    choose += [("sums_choose", first, "0.2", rate) for rate in ("1.0", "2.0")]
    assert made == [*choose, ("sums", 1, "0.2", "1.0"), ("sums", 2, "0.2", "1.0")]
    lines = (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    want = {"kl_beta": 0.2, "learning_rate": 1.0, "correct": 0.9}
    assert [json.loads(line) for line in lines] == [{**want, "seed": seed} for seed in (1, 2)]
    assert "kl_beta=0.2, learning_rate=1.0: correct 0.900" in capsys.readouterr().out
    refused = {
        "--num_iterations=1": "holds something else",
        "--kl_beta=1": "fair sets kl_beta itself",
        "--seeds=1.5": "'1.5' is not a whole number",
        "--rates=-1": "'-1' is not a number from 0",
        "config/latent.py": "fair is only for sums",
    }
    for flag, line in refused.items():
        with pytest.raises(SystemExit, match="2"):
            fair.main([*command, flag])
        assert line in capsys.readouterr().err and len(made) == 10


def test_a_run_is_summed_up_by_its_exact_figures(world, flags, tmp_path):
    prepare(tmp_path / "sums", 2, "report")
    generator = world / "digits.pt"
    changes = {"dataset": tmp_path / "sums", "block_size": 8, "masking": "columns"}
    changes |= {"generator_checkpoint": generator, "judge_checkpoint": "", "reward": "correct"}
    changes |= {"top_p": 1.0}
    run(flags, **changes, max_iters=12)
    found = fair.describe(Path(flags["out_dir"]))
    assert found["pass"][0] == pytest.approx(found["correct"], rel=1e-6)
    for k in exact.PASS_AT:
        assert found["pass"][fair.K.index(k)] == pytest.approx(found[f"pass@{k}"], rel=1e-6)
    steps = [step["correct"] for step in figures(flags["out_dir"])]
    assert found["course"]["correct"] == [np.mean(steps[:10]), np.mean(steps[10:])]


def test_the_rewards_of_the_claims():
    texts = "417+471=888", "407+471=888", "416+471=888", "4a7+471=888"  # correct, off by 10, wrong
    completions = encode(*texts)[None]  # (1,4,T)
    mask = torch.ones(1, 11, dtype=torch.bool)
    batch = make_batch(completions[:, 0], mask, 0, 4, (1, 1))
    want = {
        "successes": [1, 0, 0, 0],
        "failures": [0, -1, -1, -1],
        "shifted": [6, 5, 5, 5],
        "above_average": [0.75, 0, 0, 0],
        "loose": [1, 1, 0, 0],
    }
    for name, values in want.items():
        assert getattr(rewards, name)(completions, batch).tolist() == [values]
    many = completions[:, 2:3].expand(1, 10_000, 11)  # all wrong
    for name, share in (("coin", 0.5), ("lucky", rewards.LUCKY)):
        reward = getattr(rewards, name)(many, batch)
        assert set(reward[0].tolist()) == {0, 1}
        assert reward.mean().item() == pytest.approx(share, abs=0.015)
    assert (rewards.lucky(completions, batch) >= rewards.successes(completions, batch)).all()


def test_supervised_answers_follow_their_convention():
    masked = encode("4_+4_=88")
    batch = make_batch(masked, masked == BLANK, BLANK, 1, (1, 1))
    for key, answer in ((supervised.difference, "44+44=88"), (str, "40+48=88")):
        assert decode(supervised.best_answers(batch, key)) == [answer]
