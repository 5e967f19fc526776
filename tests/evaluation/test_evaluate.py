"""Check the table with plain loops. Shapes: N inputs, n completions of each, T characters."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import BLANK, Letters, encode, make_batch, numbers

from data.rules import SumRule, WordRule
from data.sums.prepare import prepare as prepare_sums
from grpo.evaluation.evaluate import evaluate, measure, peek, rows
from grpo.latent import Latent
from grpo.reward import Rewards, judge_metrics, judge_scores
from grpo.run.config import Config
from grpo.run.load import HeldOut, Models, load_data


def held_out_of(texts, masked, rule):
    """Make held-out inputs of `texts`. A string in `masked` has `_` at each blank."""
    return HeldOut(make_batch(encode(*texts), encode(*masked) == BLANK, BLANK, 1, (0,)), rule)


def test_words_by_hand():
    """Of 16 completions, one has a hidden word that's none, and two have other words."""
    held_out = held_out_of(["a cat on a"], ["a ___ __ a"], WordRule("cat mat on it a"))
    completions = ["a cat on a"] * 13 + ["a mat on a", "a xyz on a", "a cat it a"]
    figures = measure(encode(*completions)[None], held_out)
    assert figures == {"valid": 15 / 16, "exact": 13 / 16, "distance": 3 / 16, "pass@16": 1}


SUMS = ["12+34=46", "12+34=46", "55+11=66", "40+14=54"]
BLANKS = ["1_+3_=46", "__+__=46", "_5+_1=66", "__+1_=54"]


def test_sums_by_hand():
    """Of two completions each: 1 and 0, 2 (of two different ones), 1, and 0 are correct."""
    held_out = held_out_of(SUMS, BLANKS, SumRule())
    completions = ["13+33=46", "11+31=46", "12+34=46", "34+12=46"]
    completions += ["45+21=66", "05+61=66", "41+14=54", "09+15=54"]
    completions = encode(*completions).view(4, 2, -1)
    assert measure(completions, held_out) == {
        "correct": 4 / 8,
        "different_correct": (1 + 2 + 1 + 0) / 4,
        "pass@2": 3 / 4,
        "2 blanks": (1 + 0 + 1 + 0) / 4,
        "3 blanks": 0,
        "4 blanks": 2 / 2,
    }


def test_inputs_whose_answers_cannot_be_listed_are_compared_with_what_was_there():
    """That's so for all of them if there's one whose result is hidden."""
    held_out = held_out_of(SUMS[:2], ["1_+3_=46", "12+34=4_"], SumRule())
    completions = encode("13+33=46", "12+34=46")[:, None]
    assert measure(completions, held_out) == {"correct": 1, "exact": 1 / 2, "distance": 1 / 2}


def test_few_wrong_completions_say_nothing_about_a_judge():
    for good, columns in ((20, {"accepts", "fooled"}), (21, {"accepts"})):
        assert judge_metrics(torch.ones(40), torch.arange(40) < good).keys() == columns


@pytest.fixture
def settings(flags):
    return Config(**flags)


@pytest.fixture
def sums(settings, tmp_path):
    prepare_sums(tmp_path / "sums", 2)
    return replace(settings, dataset=str(tmp_path / "sums"), block_size=8, masking="columns")


def judge(rows):
    """Give each token in `rows` a logit that depends on this token alone: (N,T) -> (N,T)."""
    return rows.float() / 8 - 1


def half(completions, batch):
    return torch.full(completions.shape[:2], 0.5)


SAMPLING = Config(temperature=0.8)


def logits_of(seed, tokens):
    """Make logits that depend on the position and on what stands there: (N,T) -> (N,T,V)."""
    logits = numbers(seed, 16, 40, 40)
    logits[..., BLANK] = -1e9
    return logits[torch.arange(tokens.shape[1]), tokens]


def latent(seed):
    """Make a latent policy with two values of z. At temperature 1 the second is twice as likely."""

    def policy(masked):
        letters = torch.stack([logits_of(x, masked) for x in (seed, seed + 10)], dim=2)
        prior = torch.tensor([1.0, 2.0]).log().expand(len(masked), 2)
        return Latent(prior, letters, masked, masked == BLANK, SAMPLING)

    return policy


def held_out_for(config):
    return load_data(config, 40, torch.device("cpu"))[1]


def given(config, policy, before, **parts):
    """Return what `evaluate` takes."""
    parts["judge"] = partial(judge_scores, judge), 1.0
    return Models(policy, None, before, before, judge), Rewards(parts), held_out_for(config)


def test_runs_of_all_seeds_have_the_same_inputs_and_draws_of_their_own(settings):
    one, same, other = (held_out_for(replace(settings, seed=seed)).batch for seed in (1, 1, 2))
    assert torch.equal(one.masked, other.masked)
    assert torch.equal(one.uniforms, same.uniforms)
    assert not (one.uniforms == other.uniforms).all(dim=1).any()


@pytest.mark.parametrize("dataset", ["settings", "sums"])
def test_every_row(dataset, request):
    """As long as the policy hasn't changed, the rows before and after are the same."""
    config = request.getfixturevalue(dataset)
    same = given(config, latent(0), latent(0))
    result, completions = evaluate(*same, everything=True)
    for title in ("sampled", "argmax"):
        assert result[f"after, {title}"] == result[f"before, {title}"]
    assert result["the truth"].get("correct", result["the truth"].get("exact")) == 1
    assert ("cheat: common words" in result) == (dataset == "settings")
    assert ("exact marginals" in result) == (dataset == "sums")
    assert len(completions) == 8 * 4
    json.dumps(result, allow_nan=False)
    short, _ = evaluate(*same)
    assert 4 < len(short) < len(result)
    assert all(result[title] == row for title, row in short.items())
    changed, _ = evaluate(*given(config, latent(1), latent(0)), everything=True)
    differ = {title for title, row in result.items() if row != changed[title]}
    assert differ == {"after, sampled", "after, argmax"}


def test_the_best_of_16_earn_the_most(sums):
    models, rewards, held_out = given(sums, latent(1), latent(0))
    found = {title: row for title, row, *_ in rows(models, rewards, held_out, everything=True)}
    twice = found["left to right, 2 passes"]
    (best,) = judge_scores(judge, found["the same, best reward of 16"], held_out.batch).T
    assert torch.equal(best, judge_scores(judge, twice, held_out.batch).amax(dim=1))


def test_own_rewards_and_other_judges_have_columns(settings):
    """The rule has one anyway, so it gets no second one if it's a part of the reward."""
    parts = {name: (half, 1.0) for name in ("valid", "my.py:half", "b/c.pt")}
    result, completions = evaluate(*given(settings, latent(1), latent(0), **parts))
    for line in completions:
        assert line.keys() == {"input", "completion", "judge", "my.py:half", "b/c.pt"}
        assert line["my.py:half"] == line["b/c.pt"] == 0.5
    for row in result.values():
        assert row["reward_my.py:half"] == row["reward_b/c.pt"] == 0.5
        assert "reward_valid" not in row


def test_a_peek_shows_the_truth_and_before_and_later_only_now(settings):
    """The share is that of one draw of each input."""
    held_out = held_out_for(replace(settings, eval_inputs=100))
    batch, models = held_out.batch, Models(latent(0), None, None, None, judge)
    completions = latent(0)(batch.masked).sample(batch).completions[:, :1]
    held_out.rule = Letters("abcdefghijklmno")
    share = measure(completions, held_out)["letters"]
    assert 0 < share < 1
    for step, titles in ((0, ["truth", "before"]), (3, ["now"])):
        head, *lines = peek(models, Rewards({}), held_out, step).splitlines()
        assert f"letters {share:.3f}" in head
        assert [line.split()[0] for line in lines] == 3 * titles
