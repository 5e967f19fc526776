import json
import math
import re
from dataclasses import replace

import pytest
import torch
from conftest import BLANK, encode, make_batch

from data.per_word import number_words
from data.rules import WordRule
from data.vocabulary import decode
from grpo.evaluation.evaluate import (
    COLUMNS,
    HeldOut,
    evaluate,
    format_table,
    measure,
    peek,
)
from grpo.latent import Latent
from grpo.policy import Product
from grpo.reward import Rewards
from grpo.run.config import Config
from grpo.run.load import Models, load_data


def held_out_of(texts, masks, words):
    """Make held-out inputs of `texts`. A string in `masks` has `_` at each blank."""
    batch = make_batch(encode(*texts), encode(*masks) == BLANK, BLANK, 1, (0,))
    return HeldOut(batch, WordRule(" ".join(words)), texts[0], lambda _, mask: number_words(mask))


def figures_of(text, mask, fills, words):
    return measure(
        torch.stack([encode(fill) for fill in fills], 1), held_out_of([text], [mask], words)
    )


def test_words_by_hand():
    """Of 16 fills of `cat` and `on`: the first word is right 14 times, the second 15 times."""
    fills = ["a cat on a"] * 13 + ["a mat on a", "a xyz on a", "a cat it a"]
    figures = figures_of("a cat on a", "a ___ __ a", fills, {"cat", "mat", "on", "it", "a"})
    want = {
        "valid_words": 31 / 32,
        "exact_words": 29 / 32,
        "distinct_words": (14 * 2 / 2 + 1 / 2 + 2 / 2) / 16,  # only the fill with xyz has one
        "different_valid_words": (2 + 2) / 2,
        "pass@16": 1,
    }
    assert {name: figures[name] for name in want} == pytest.approx(want)


def test_words_of_one_fill():
    """A word may be exact or valid without being the other. A cut word does not count."""
    figures = figures_of("xyz cat on", "xy_ ___ _n", ["xyq mat in"], {"mat", "in", "on"})
    assert figures["valid_words"] == 1 and figures["exact_words"] == 0
    figures = figures_of("a xyz a", "a ___ a", ["a xyz a"], {"cat"})
    assert figures["valid_words"] == figures["distinct_words"] == 0
    assert figures["exact_words"] == 1


def test_without_a_hidden_word_shares_are_0():
    figures = figures_of("abcdef", "ab_def", ["abcdef"], {"abcdef"})
    assert figures["valid_words"] == figures["exact_words"] == figures["distinct_words"] == 0


def test_distinct_words_are_counted_over_all_inputs():
    """The hidden words are cat, dog, cat, cat. The fills are dog, dog, dog and the non-word xyz."""
    texts = ["a cat a dog a", "a cat a cat a"]
    held_out = held_out_of(texts, ["a ___ a ___ a"] * 2, {"dog"})
    figures = measure(encode("a dog a dog a", "a dog a xyz a")[:, None], held_out)
    assert figures["distinct_words"] == 1 / 2 and figures["valid_words"] == 3 / 4


def test_a_share_of_many_fills_is_the_mean_of_the_shares_of_each_fill():
    """Of 16 fills of two inputs, the first four are right, and the next four write cat alone."""
    texts = ["a cat a dog a", "a dog a cat a"]
    held_out = held_out_of(texts, ["a ___ a ___ a"] * 2, {"dog", "cat"})
    fills = torch.randint(1, 5, (2, 16, 13), generator=torch.Generator().manual_seed(0))
    fills[:, :4] = held_out.batch.tokens[:, None]
    fills[:, 4:8] = encode("a cat a cat a")
    figures = measure(fills, held_out)
    alone = [measure(fills[:, j : j + 1], held_out) for j in range(16)]
    assert {each["distinct_words"] for each in alone} == {1, 1 / 2, 0}
    for name, value in alone[0].items():
        mean = sum(each[name] for each in alone) / 16
        assert figures[name] == pytest.approx(mean), (name, value)
    assert figures["different_valid_words"] == (1 + 2 + 2 + 1) / 4  # each hidden word by itself


@pytest.fixture
def settings(world):
    return Config(
        dataset=str(world / "text"),
        block_size=16,
        masking="word",
        eval_inputs=6,
        temperature=0.8,
        device="cpu",
        dtype="float32",
        kernel="torch",
    )


def judge(rows):
    """Give each token in `rows` a logit that depends on this token alone: (N,T) -> (N,T)."""
    return rows.float() / 8 - 1


def half(completions, batch):
    return torch.full(completions.shape, 0.5)


SAMPLING = Config(temperature=0.8)


def logits_of(seed, tokens):
    """Make logits that depend on the position and on what stands there: (N,16) -> (N,16,28)."""
    logits = torch.randn(16, 29, 28, generator=torch.Generator().manual_seed(seed))
    logits[..., BLANK] = -1e9
    return logits[torch.arange(16), tokens]


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
    rewards = Rewards(dict(parts))
    models = Models(policy, before, before, judge)
    return evaluate(models, rewards, held_out_for(config), config, everything)


def test_runs_of_all_seeds_have_the_same_inputs_and_draws_of_their_own(settings):
    one, same, other = (held_out_for(replace(settings, seed=seed)).batch for seed in (1, 1, 2))
    assert torch.equal(one.masked, other.masked) and torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.uniforms, same.uniforms)
    assert not (one.uniforms == other.uniforms).any(dim=-1).all(dim=1).any()


ROWS = [  # of a policy without a latent, at the end of a run
    "the text",
    "before, sampled",
    "before, argmax",
    "cheat: common words",
    "after, sampled",
    "after, argmax",
]
AGAIN = ["before, best of 16", "one by one, drawn", "one by one, surest"]  # computed when asked for


@pytest.mark.parametrize("make", [product, latent])
def test_every_row(settings, make):
    """The policy has not changed, so the rows before and after are the same."""
    result, completions = evaluated(settings, make(0), make(0), everything=True)
    rows = ROWS + AGAIN
    assert list(result) == rows
    lines = format_table(result).splitlines()[1 : 1 + len(rows)]
    assert [re.split(" {2,}", line)[0] for line in lines] == rows
    for title in result:
        if title.startswith("after"):
            assert result[title] == result[title.replace("after", "before")]
    assert result["the text"]["exact_words"] == 1
    passes = result["one by one, surest"]["passes"]
    blanks = held_out_for(settings).batch.mask.sum(dim=1).float()
    assert passes == pytest.approx(blanks.mean().item())
    assert len(completions) == 6 * 16
    json.dumps(result, allow_nan=False)
    short, first = evaluated(settings, make(0), make(0))
    assert list(short) == ROWS and first == completions[::16]
    for title, row in short.items():  # only the judge read less
        assert row | {"judge": 0} == result[title] | {"judge": 0} or "judge" not in row


def test_the_judges_column_is_the_mean_of_its_probabilities(settings):
    result, lines = evaluated(settings, product(1), product(0), everything=True)
    batch = held_out_for(settings).batch
    fills = product(1)(batch).sample().completions  # (N,16,T)
    means = []
    for i, group in enumerate(fills):
        for fill in group:
            words = [batch.words[i] == n for n in batch.words[i][batch.mask[i]].tolist()]
            chances = [1 / (1 + math.exp(-judge(fill[word]).mean())) for word in words]
            means.append(sum(chances) / len(chances))
    assert result["after, sampled"]["judge"] == pytest.approx(sum(means) / len(means), abs=1e-5)
    assert [line["judge"] for line in lines] == pytest.approx(means, abs=1e-5)


def test_own_rewards_have_columns(settings):
    """The judge and the rewards are asked about the text, and about what both policies draw."""
    parts = {"judge": (None, 1.0), "half": (half, 2.0)}
    result, completions = evaluated(settings, product(1), product(0), parts)
    assert all(line["reward_half"] == 0.5 for line in completions)
    head, *lines = format_table(result).splitlines()
    assert head.endswith("half")
    asked = [line for line in lines if line.endswith("0.500")]
    assert [line.split("  ")[0] for line in asked] == [
        "the text",
        "before, sampled",
        "after, sampled",
    ]
    assert "half" not in format_table(evaluated(settings, product(1), product(0))[0])


def rows_of():
    """Make the rows of a table of words. A table of sums has two other columns in their place."""
    row = {name: 10.5 for name in COLUMNS if "right" not in name}
    return {title: row | {"judge": 0.5} for title in ROWS + AGAIN}


def test_a_fooled_judge_is_named():
    line = "the judge prefers these fills to the original text: it is being fooled"
    result = rows_of()
    assert line not in format_table(result).splitlines()
    result["after, sampled"]["judge"] = 0.51
    assert line in format_table(result).splitlines()


def test_a_peek_shows_the_text_and_before_and_later_only_now(settings):
    held_out = held_out_for(settings)

    def lines(policy, step):
        shown = peek(policy, held_out, step).splitlines()[1:]
        return [line.split(maxsplit=1) for line in shown]

    first, same, changed = lines(product(0), 0), lines(product(0), 3), lines(product(1), 3)
    assert [title for title, _ in first[:2]] == ["text", "before"] and len(first) % 2 == 0
    assert {title for title, _ in same + changed} == {"now"}
    before = [text for _, text in first[1::2]]
    assert [text for _, text in same] == before
    assert all(text not in before for _, text in changed)
    original = first[0][1].replace("[", "").replace("]", "").strip()
    assert original in {text.strip() for text in decode(held_out.batch.tokens)}


def knowing(tokens, certainty):
    """Make a policy that finds `tokens` (N,T) likeliest, with logits of this certainty."""

    def policy(batch):
        # For each masked input, find the text that has most characters in common with it: (M,)
        nearest = (batch.masked[:, None] == tokens).sum(dim=-1).argmax(dim=1)
        logits = certainty * torch.nn.functional.one_hot(tokens[nearest], 28).float()
        return Product(logits, batch, SAMPLING)

    return policy


@pytest.mark.parametrize("masking", ["word", "random"])
def test_a_peek_says_what_the_table_says(settings, masking):
    config = replace(settings, eval_inputs=100, masking=masking)
    held_out = held_out_for(config)
    before, after = (knowing(held_out.batch.tokens, certainty) for certainty in (2.5, 4.0))
    result, _ = evaluated(config, after, before)
    shares = [result[f"{name}, sampled"]["valid_words"] for name in ("before", "after")]
    assert 0 < shares[0] < shares[1] < 1
    for policy, step, share in ((before, 0, shares[0]), (after, 2, shares[1])):
        head = peek(policy, held_out, step).splitlines()[0]
        assert head == f"step {step}: valid words on held-out text {share:.3f}"
