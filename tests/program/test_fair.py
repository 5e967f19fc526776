"""Check how a variant is tuned and summed up, and the rewards of the claims."""

from types import SimpleNamespace

import pytest
import torch
from conftest import BLANK, encode, make_batch, read_jsonl, run

from data.sums.prepare import prepare
from grpo.evaluation import exact
from grpo.experiments import critic, fair, rewards
from grpo.run.load import END

FIRST, SECOND = fair.CHOOSING


@pytest.fixture
def made(monkeypatch):
    """List the runs that are made: (half, β, learning rate, seed). Nothing is trained."""
    made = []

    def run(command, **_):
        flags = dict(word[2:].split("=") for word in command if word.startswith("--"))
        half = "choose" if flags["dataset"] == "sums_choose" else "report"
        beta, rate = float(flags["kl_beta"]), float(flags["learning_rate"])
        made.append((half, beta, rate, int(flags["seed"])))
        diverged = rate == 1e8
        return SimpleNamespace(returncode=diverged, stderr="FloatingPointError" * diverged)

    def describe(self, out_dir, half):
        _, beta, _, seed = made[-1]
        correct = {0.05: 0.5, 0.1: 0.9, 0.2: 0.91, 0.4: 0.7}[beta] - 0.05 * (
            beta == 0.2 and seed == SECOND
        )
        return {"correct": correct}

    monkeypatch.setattr(fair.subprocess, "run", run)
    monkeypatch.setattr(fair.Variant, "describe", describe)
    return made


def test_a_variant_is_chosen_on_one_half_and_reported_on_the_other(tmp_path, made, capsys):
    """The best one is at the edge of the grid, so it grows there. A second seed decides."""
    command = [str(tmp_path / "out"), "config/rule.py", "--grid", "kl_beta=0.05,0.1,0.2"]
    command += ["--grid", "learning_rate=1e-3,1e8", "--seeds=1-2"]
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


def test_after_ctrl_c_the_same_command_goes_on(tmp_path, made, capsys, monkeypatch):
    """And a seed may be a large number."""
    command = [str(tmp_path / "out"), "config/rule.py", "--seeds=1234567"]
    command += ["--grid", "kl_beta=0.1", "--grid", "learning_rate=1e-3"]
    run = fair.subprocess.run

    def interrupted(*given, **options):
        if made:
            raise KeyboardInterrupt
        return run(*given, **options)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(fair.subprocess, "run", interrupted)
        fair.main(command)
    assert "stopped; the same command goes on from here" in capsys.readouterr().err
    fair.main(command)
    assert [(half, seed) for half, *_, seed in made] == [("choose", FIRST), ("report", 1234567)]


def test_what_is_refused(tmp_path, made, capsys, monkeypatch):
    command = [str(tmp_path / "out"), "config/rule.py", "--grid", "kl_beta=0.1", "--seeds=1"]
    fair.main(command)
    words = "supervised any --rate=1e-3 --start=model/pretrained/text.pt".split()
    variant = fair.Variant(tmp_path, [*words, "--reward=grpo/experiments/rewards.py:wish"])
    files = variant.made_with["files"]
    assert "grpo/experiments/rewards.py" in files
    assert {"grpo/experiments/supervised.py", "model/losses.py"} <= {*files}
    assert "model/pretrained/text.pt" in files
    assert not {"grpo/one_file.py", "grpo/tokens.py"} & {*files}
    monkeypatch.setattr(fair, "made_with", lambda config: {"files": {"grpo/advantage.py": "new"}})
    refused = {
        "--num_iterations=1": "other settings",
        "--batch_size=128": "grpo/advantage.py changed",
        "--kl_beta=1": "fair sets --kl_beta itself",
        f"--seeds={FIRST}": "choose, so they can't be reported",
        "--seeds=1.5": "invalid",
        "--seeds=9-1": "invalid",
        "--top_k=1": "without a truncation",
        "config/latent.py": "fair is for sums",
    }
    for flag, line in refused.items():
        with pytest.raises(SystemExit, match="2"):
            fair.main([*command, flag])
        assert line in capsys.readouterr().err


def test_a_run_is_summed_up_by_its_exact_figures(world, flags, tmp_path, monkeypatch):
    prepare(tmp_path / "sums", 2)
    monkeypatch.setattr(fair, "DATASETS", {"report": str(tmp_path / "sums")})
    generator = str(world / "digits.pt")
    changes = {"dataset": tmp_path / "sums", "block_size": 8, "masking": "columns"}
    changes |= {"generator_checkpoint": generator, "judge_checkpoint": "", "reward": "correct"}
    run(flags, **changes, top_p=1.0, max_iters=12)
    plain = fair.Config
    small = {"block_size": 8, "generator_checkpoint": generator, "eval_inputs": 50}
    monkeypatch.setattr(fair, "Config", lambda **given: plain(**(given | small)))
    variant = fair.Variant(tmp_path, ["config/rule.py"])
    found = variant.describe(tmp_path / "out", "report")
    assert found["pass"][0] == pytest.approx(found["correct"], rel=1e-6)
    for k in exact.PASS_AT:
        assert found["pass"][fair.K.index(k)] == pytest.approx(found[f"pass@{k}"], rel=1e-6)


def test_the_critic_is_subtracted_and_learns_from_training_alone():
    completions = encode("417+471=888", "417+472=888")[None]  # (1,2,T)
    mask = torch.tensor([[c in "17" for c in "417+471=888"]])
    for step, learns in (END, False), (0, True):
        batch = make_batch(completions[:, 0], mask, BLANK, 2, (1, step))
        before = critic.value(batch.masked).item()
        with torch.no_grad():
            found = critic.advantage(completions, batch)
        assert found.flatten().tolist() == pytest.approx([1 - before, -before])
        after = critic.value(batch.masked).item()
        assert (0 <= before < after < 0.5) if learns else after == before


def test_the_rewards_of_the_claims():
    texts = "417+471=888", "407+471=888", "416+471=888", "4a7+471=888"  # correct, off by 10, wrong
    completions = encode(*texts)[None]  # (1,4,T)
    mask = torch.ones(1, 11, dtype=torch.bool)
    batch = make_batch(completions[:, 0], mask, 0, 4, (1, 1))
    want = {
        "successes": [1, 0, 0, 0],
        "failures": [0, -1, -1, -1],
        "shifted": [6, 5, 5, 5],
        "loose": [1, 1, 0, 0],
        "wish": [0, 0, 0, 0],  # 417 isn't a palindrome
        "favorite": [1, 1, 1, 1],  # all is hidden, so all end in 88
    }
    for name, values in want.items():
        assert getattr(rewards, name)(completions, batch).tolist() == [values]
    assert rewards.wish(encode("414+474=888", "414+473=888")[None], batch).tolist() == [[1, 0]]
    ends = encode("he met them", "he met them", "he met thow")[None]
    short = make_batch(ends[:, 0], torch.arange(11)[None] > 6, 0, 3, (1, 1))
    assert rewards.favorite(ends, short).tolist() == [[1, 1, 0]]
    many = completions[:, 2:3].expand(1, 10_000, 11)  # all wrong
    for name, share in (("coin", 0.5), ("lucky", rewards.LUCKY)):
        reward = getattr(rewards, name)(many, batch)
        assert set(reward[0].tolist()) == {0, 1}
        assert reward.mean().item() == pytest.approx(share, abs=0.015)
    assert (rewards.lucky(completions, batch) >= rewards.successes(completions, batch)).all()
