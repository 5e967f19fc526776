"""Check the table with plain loops. Shapes: N inputs, n completions of each, T characters."""

import json
import re
from dataclasses import replace

import pytest
import torch
from conftest import BLANK, encode, make_batch

from data.rules import SumRule, WordRule, check_gaps
from data.sums.prepare import prepare as prepare_sums
from data.sums.rule import is_correct
from data.vocabulary import VOCABULARY, decode
from grpo.evaluation.evaluate import (
    evaluate,
    format_table,
    measure,
    peek,
    table_rows,
)
from grpo.evaluation.rivals import best_by_word
from grpo.latent import Latent
from grpo.policy import Product
from grpo.reward import Rewards, judge_metrics, log_odds
from grpo.run.config import Config
from grpo.run.load import HeldOut, Models, load_data


def held_out_of(texts, masks, words):
    """Make held-out inputs of `texts`. A string in `masks` has `_` at each blank."""
    batch = make_batch(encode(*texts), encode(*masks) == BLANK, BLANK, 1, (0,))
    return HeldOut(batch, WordRule(" ".join(words)))


def figures_of(text, mask, completions, words):
    return measure(
        torch.stack([encode(completion) for completion in completions], 1),
        held_out_of([text], [mask], words),
    )


def test_words_by_hand():
    """Of 16 completions of `cat` and `on`: the first word is correct 14 times, the other 15."""
    completions = ["a cat on a"] * 13 + ["a mat on a", "a xyz on a", "a cat it a"]
    figures = figures_of("a cat on a", "a ___ __ a", completions, {"cat", "mat", "on", "it", "a"})
    want = {
        "valid_words": 31 / 32,
        "exact": 29 / 32,
        "pass@16": 1,
    }
    assert {name: figures[name] for name in want} == pytest.approx(want)


def test_words_of_one_fill():
    """A word may be exact or valid without being the other. A cut word does not count."""
    figures = figures_of("xyz cat on", "xy_ ___ _n", ["xyq mat in"], {"mat", "in", "on"})
    assert figures["valid_words"] == 1 and figures["exact"] == 0
    figures = figures_of("a xyz a", "a ___ a", ["a xyz a"], {"cat"})
    assert figures["valid_words"] == 0 and figures["exact"] == 1
    figures = figures_of("a purred a", "a p_rr_d a", ["a purrxd a"], {"purred"})
    assert figures["exact"] == 0, "of two runs of blanks, one is as it was"
    figures = figures_of("a cat on a", "a ca___n a", ["a cat xn a"], {"cat", "on"})
    assert figures["exact"] == 0.5, "one run of blanks is in two words"


def test_without_a_hidden_word_shares_are_0():
    figures = figures_of("abcdef", "ab_def", ["abcdef"], {"abcdef"})
    assert figures["valid_words"] == figures["exact"] == 0


SUMS = ["12+34=46", "12+34=46", "55+11=66", "40+14=54"]
BLANKS = ["1_+3_=46", "__+__=46", "_5+_1=66", "__+1_=54"]


def test_sums_by_hand():
    """Of two completions each: 1 and 0, 2 (of two different ones), 1, and 0 are correct."""
    batch = make_batch(encode(*SUMS), encode(*BLANKS) == BLANK, BLANK, 2, (0,))
    held_out = HeldOut(batch, SumRule())
    completions = ["13+33=46", "11+31=46", "12+34=46", "34+12=46"]
    completions += ["45+21=66", "05+61=66", "41+14=54", "09+15=54"]
    figures = measure(encode(*completions).view(4, 2, -1), held_out)
    assert figures["correct"] == 4 / 8
    assert figures["different_correct"] == (1 + 2 + 1 + 0) / 4
    assert figures["pass@2"] == 3 / 4
    blanks = {"2 blanks": (1 + 0 + 1 + 0) / 4, "3 blanks": 0, "4 blanks": 2 / 2}
    assert {name: figures[name] for name in figures if "blanks" in name} == blanks
    lines = HeldOut(batch, None)
    assert measure(batch.tokens[:, None], lines) == {"exact": 1}
    assert measure(encode(*completions).view(4, 2, -1), lines) == {
        "exact": 1.5 / 8,
        "pass@2": 1 / 4,
    }


def slow_figures(completions, masks, scores):
    """Ask a sum's completions one by one: -> correct, accepts, and fooled, as shares."""
    correct = [is_correct(completion) for completion in completions]
    accepted = []
    for mask, score in zip(masks, scores):
        blanks = [x for x, blank in zip(score, mask) if blank]
        accepted.append(sum(blanks) / len(blanks) > 0)
    wrong = [a for r, a in zip(correct, accepted) if not r]
    return sum(correct) / len(correct), sum(accepted) / len(correct), sum(wrong) / len(wrong)


def uncertain(rows):
    """Judge each character by a number that only depends on it: (N,T) -> (N,T)."""
    return torch.tensor([(7 * v) % 11 - 5.3 for v in range(len(VOCABULARY))])[rows]


def some_sums():
    """Make 20 sums with 4 completions each, some of them correct."""
    g = torch.Generator().manual_seed(1)
    texts = [f"{a}+{b}={a + b}" for a, b in (10 + torch.randint(40, (20, 2), generator=g)).tolist()]
    tokens = encode(*texts)  # (20,T)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[::2, [0, 3]] = True
    mask[::4, [1, 4]] = mask[1::2, [1, 4]] = True  # both columns, or the second one alone
    batch = replace(make_batch(tokens, mask, BLANK, 4, (0,)), words=mask.long())
    digits = torch.randint(VOCABULARY.index("1"), VOCABULARY.index("9"), (20, 4, 8), generator=g)
    completions = torch.where(mask[:, None], digits, tokens[:, None])
    completions[:, 0] = tokens
    return batch, completions


def test_right_accepts_and_fooled_are_a_loop_over_fills():
    batch, completions = some_sums()
    scores = log_odds(uncertain, completions, batch)  # (20,4,T)
    good, gaps = check_gaps(SumRule(), completions, batch.tokens, batch.mask)
    metrics = judge_metrics(scores, batch.words, good, gaps)
    correct = good.sum() / (4 * gaps.amax(dim=1).sum())
    logits = uncertain(completions.flatten(0, 1)).tolist()
    masks = batch.mask.repeat_interleave(4, dim=0).tolist()
    want = slow_figures(decode(completions), masks, logits)
    assert (correct, metrics["accepts"], metrics["fooled"]) == pytest.approx(want)
    assert 0 < want[1] < 1 and 0 < want[2] < 1


def test_few_wrong_fills_say_nothing_about_a_judge():
    batch, completions = some_sums()
    scores = torch.ones(completions.shape)
    good, gaps = check_gaps(SumRule(), completions, batch.tokens, batch.mask)
    assert judge_metrics(scores, batch.words, good, gaps) == {"accepts": 1, "fooled": 1}
    good[6:] = True
    assert judge_metrics(scores, batch.words, good, gaps) == {"accepts": 1}


def test_a_judge_that_read_some_completions_is_compared_with_what_is_right_of_those():
    batch, completions = some_sums()
    scores = torch.ones(20, 3, 8)  # it accepts all that it read but for the first, which is correct
    scores[:, 0] = -1
    figures = measure(completions, HeldOut(batch, SumRule()), {"judge": scores})
    assert figures["fooled"] == 1 and figures["accepts"] == pytest.approx(2 / 3)


def test_a_judge_of_text_accepts_runs_of_blanks_and_is_fooled_by_words():
    """Of 20 completions it accepts the two runs of a wrong word in five, and one run in the rest.

    It rejects `on` in the first input, and accepts it in the second. All words count alike.
    """
    texts, masks = ["a purred on"] * 2, encode("a p_rr_d __", "a purred __") == BLANK
    batch = make_batch(encode(*texts), masks, BLANK, 20, (0,))
    completions = batch.tokens[:, None].repeat(1, 20, 1)  # (2,20,11)
    completions[0, :, 3] = 0
    scores = torch.full(completions.shape, 9.0)  # also those of visible text, which don't count
    scores[0, 5:, 6] = scores[0, :, 9:] = -1
    rule = WordRule(texts[0], cut=False)
    given = check_gaps(rule, completions, batch.tokens, batch.mask)
    assert judge_metrics(scores, batch.words, *given) == {
        "accepts": (20 + 5 + 0 + 20) / 80,
        "fooled": 5 / 20,
    }


@pytest.fixture
def settings(world):
    return Config(
        dataset=str(world / "text"),
        block_size=16,
        masking="word",
        eval_inputs=6,
        temperature=0.8,
        device="cpu",
        kernel="torch",
    )


@pytest.fixture
def sums(settings, tmp_path):
    prepare_sums(tmp_path / "sums", 2, "report")
    return replace(settings, dataset=str(tmp_path / "sums"), block_size=8, masking="columns")


def judge(rows):
    """Give each token in `rows` a logit that depends on this token alone: (N,T) -> (N,T)."""
    return rows.float() / 8 - 1


def half(completions, batch):
    return torch.full(completions.shape, 0.5)


SAMPLING = Config(temperature=0.8)


def logits_of(seed, tokens):
    """Make logits that depend on the position and on what stands there: (N,T) -> (N,T,V)."""
    logits = torch.randn(16, 40, 40, generator=torch.Generator().manual_seed(seed))
    logits[..., BLANK] = -1e9
    return logits[torch.arange(tokens.shape[1]), tokens]


def product(seed):
    return lambda batch: Product(logits_of(seed, batch.masked), batch, SAMPLING)


def latent(seed):
    """Make a latent policy with two values of z. At temperature 1 the second is twice as likely."""

    def policy(batch):
        letters = torch.stack(
            [logits_of(seed, batch.masked), logits_of(seed + 10, batch.masked)], 2
        )
        prior = torch.tensor([1.0, 2.0]).log().expand(*batch.mask.shape, 2)
        return Latent(prior, letters, batch, SAMPLING)

    return policy


def held_out_for(config):
    return load_data(config, torch.device("cpu"))[2]


def evaluated(config, policy, before, parts=(), everything=False):
    """Compute the table of a few inputs: -> its rows, and the completions."""
    given = Models(policy, before, before, judge), Rewards(dict(parts)), held_out_for(config)
    return evaluate(*given, everything)


def test_runs_of_all_seeds_have_the_same_inputs_and_draws_of_their_own(settings):
    one, same, other = (held_out_for(replace(settings, seed=seed)).batch for seed in (1, 1, 2))
    assert torch.equal(one.masked, other.masked) and torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.uniforms, same.uniforms)
    assert not (one.uniforms == other.uniforms).all(dim=1).any()


@pytest.mark.parametrize("make", [product, latent])
@pytest.mark.parametrize("dataset", ["settings", "sums"])
def test_every_row(dataset, make, request):
    """The policy has not changed, so the rows before and after are the same."""
    config = request.getfixturevalue(dataset)
    result, completions = evaluated(config, make(0), make(0), everything=True)
    lines = format_table(result, "judge").splitlines()
    assert [re.split(" {2,}", line)[0] for line in lines[1 : 1 + len(result)]] == [*result]
    for title in ("sampled", "argmax"):
        assert result[f"after, {title}"] == result[f"before, {title}"]
    assert result["the truth"].get("correct", result["the truth"].get("exact")) == 1
    assert ("cheat: common words" in result) == (dataset == "settings")
    assert ("exact marginals" in result) == (dataset == "sums")
    assert len(completions) == 6 * (4 if dataset == "sums" else 2)
    json.dumps(result, allow_nan=False)
    short, _ = evaluated(config, make(0), make(0))
    assert 4 < len(short) < len(result)
    assert all(result[title] == row for title, row in short.items())


def test_best_of_16_goes_by_the_judges_scores(sums):
    held_out, policy = held_out_for(sums), product(0)
    q = policy(held_out.batch)
    drawn = q.sample().completions
    rows = table_rows(Models(policy, None, policy, judge), held_out, everything=True)
    (best,) = (completions for title, completions, _ in rows if title == "best of 16, judge")
    assert torch.equal(best, best_by_word(q, drawn, log_odds(judge, drawn, held_out.batch)))


def test_only_the_rows_after_are_about_the_policy(sums):
    one, _ = evaluated(sums, product(0), product(5), everything=True)
    other, _ = evaluated(sums, product(1), product(5), everything=True)
    changed = {title for title, row in one.items() if row != other[title]}
    assert "after, sampled" in changed
    assert all(title.startswith("after") for title in changed)


def test_own_rewards_have_columns(settings):
    parts = {"judge": (lambda x, batch: judge(x), 1.0), "half": (half, 2.0)}
    result, completions = evaluated(settings, product(1), product(0), parts)
    assert all(line["half"] == 0.5 for line in completions)
    head, *lines = format_table(result, "judge").splitlines()
    assert head.endswith("half")
    assert all(line.endswith("0.500") for line in lines[: len(result)])


@pytest.mark.parametrize("good", ["correct", "valid_words"])
def test_a_fooled_judge_is_named_if_it_pays(good):
    line = "the judge accepts much more than is correct: it's being fooled"
    for accepted, reward, named in ((0.54, "judge", 0), (0.56, "judge", 1), (0.56, "a.pt", 0)):
        result = {"after, sampled": {good: 0.5, "accepts": accepted}}
        assert (line in format_table(result, reward).splitlines()) == named


def test_a_peek_shows_the_truth_and_before_and_later_only_now(settings):
    """The share is that of one draw of each input."""
    held_out = held_out_for(replace(settings, eval_inputs=100, masking="random"))
    held_out = replace(held_out, rule=None)  # so that letters count, and some are correct
    models = Models(product(0), None, None, judge)
    completions = models.policy(held_out.batch).sample().completions[:, :1]
    drawn, truth = (set(decode(texts)) for texts in (completions[:, 0], held_out.batch.tokens))
    exact = measure(completions, held_out)["exact"]
    assert 0 < exact < 1
    for step, titles in ((0, ["truth", "before"]), (3, ["now"])):
        head, *lines = peek(models, held_out, step).splitlines()
        assert head.startswith(f"step {step}: exact {exact:.3f}, the judge accepts ")
        for title, line in zip(3 * titles, lines, strict=True):
            text = line[9:].replace("[", "").replace("]", "")
            assert line[:9].strip() == title and text in (truth if title == "truth" else drawn)
