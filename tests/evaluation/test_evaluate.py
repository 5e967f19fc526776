import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from conftest import BLANK, encode

from data.dataset import decode
from data.text.prepare import VOCABULARY
from grpo.batch import make_batch
from grpo.evaluation.evaluate import (
    COLUMNS,
    ROWS,
    SHORT_COLUMNS,
    SHORT_ROWS,
    HeldOut,
    format_table,
    hold_out,
    measure,
    peek,
    table,
)
from grpo.latent_policy import Latent
from grpo.plumbing.config import Config
from grpo.plumbing.load import load_data
from grpo.product_policy import Product
from grpo.reward import Rewards
from grpo.sampling import Sampling


def held_out_of(texts, masks, words):
    """Make held-out inputs of `texts`. A string in `masks` has `_` at each blank."""
    batch = make_batch(encode(*texts), encode(*masks) == BLANK, BLANK, 1, (0,))
    return HeldOut(batch, VOCABULARY, texts[0], set(words))


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
        "distinct_words": 2 / 2,  # counted in the first fill only
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
    assert math.isfinite(figures["ngram_bits"])


def test_distinct_words_are_counted_over_all_inputs():
    """The hidden words are cat, dog, cat, cat. The fills are dog, dog, dog and the non-word xyz."""
    texts = ["a cat a dog a", "a cat a cat a"]
    held_out = held_out_of(texts, ["a ___ a ___ a"] * 2, {"dog"})
    figures = measure(encode("a dog a dog a", "a dog a xyz a")[:, None], held_out)
    assert figures["distinct_words"] == 1 / 2 and figures["valid_words"] == 3 / 4


@pytest.fixture
def settings(world):
    return Config(
        dataset=str(world / "text"),
        block_size=16,
        masking="word",
        hidden_words=2,
        eval_inputs=6,
        temperature=0.8,
        device="cpu",
        dtype="float32",
        kernel="torch",
    )


def judge(rows):
    """Give each token in `rows` a logit that depends on this token alone: (N,T) -> (N,T)."""
    return rows.float() / 8 - 1


def half(completions, batch, decode):
    return torch.full(completions.shape, 0.5)


SAMPLING = Sampling(temperature=0.8)


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
    train, val = load_data(config.dataset, config.block_size, config.prompts_file)
    return hold_out(config, train, val, torch.device("cpu"))


def evaluated(config, policy, before, parts=()):
    """Compute the table of a few inputs: -> its rows, and the completions."""
    rewards = Rewards(dict(parts), lambda tokens: [])
    return table(policy, before, judge, rewards, held_out_for(config), config)


@pytest.mark.parametrize("policy", [product, latent])
def test_every_row(settings, policy):
    """The policy has not changed, so the rows before and after are the same.

    The policy samples at temperature 0.8, so the row at 0.8 equals `before_sample`.
    """
    result, completions = evaluated(settings, policy(0), policy(0))
    for name in ("sample", "argmax"):
        assert result[f"before_{name}"] == result[f"after_{name}"]
    rows = {row["temperature"]: row for row in result["before_at_temperatures"]}
    assert rows[0.8].items() <= (result["before_sample"] | {"temperature": 0.8}).items()
    assert rows[0.2]["different_valid_words"] <= rows[1.0]["different_valid_words"]
    assert result["original"]["exact_words"] == 1
    passes = result["reference_sequential_random"]["forward_passes"]
    blanks = held_out_for(settings).batch.mask.sum(dim=1).float()
    assert passes == pytest.approx(blanks.mean().item())
    assert len(completions) == 6 * 16
    json.dumps(result, allow_nan=False)


def test_the_best_of_16_is_what_judge_and_base_model_together_find_likeliest(settings):
    """For each word separately, the best of the base model's 16 fills is chosen."""
    result, _ = evaluated(settings, product(1), product(0))
    batch = held_out_for(settings).batch
    fills = product(0)(batch).sample(batch.uniforms).completions  # (6,16,T)
    log_q = logits_of(0, batch.masked).log_softmax(dim=-1)  # (6,T,V)
    best = []
    for i in range(6):
        chosen = []
        for number in range(1, int(batch.words[i].max()) + 1):
            at = (batch.words[i] == number).nonzero().squeeze(1)
            letters = fills[i][:, at]  # (16,n)
            says = judge(letters).mean(dim=1).clamp(-8, 8)  # (16,)
            q = log_q[i, at].gather(1, letters.T).sum(dim=0)  # (16,)
            chosen += len(at) * [says[(q + says).argmax()].sigmoid()]
        best.append(sum(chosen) / len(chosen))
    assert result["before_best_of_16"]["judge"] == pytest.approx(sum(best).item() / 6)


def test_the_cheat_writes_valid_words_and_looks_at_nothing(settings):
    result, _ = evaluated(settings, product(1), product(0))
    cheat = result["most_frequent"]
    assert cheat["valid_words"] == 1 and cheat["forward_passes"] == 0
    assert cheat["distinct_words"] < result["original"]["distinct_words"]


def test_what_was_before_does_not_depend_on_the_policy(settings):
    result, _ = evaluated(settings, product(1), product(0))
    same, _ = evaluated(settings, product(0), product(0))
    for name in same.keys() - {"gap_closed"}:
        assert (result[name] != same[name]) == name.startswith("after"), name


def test_gap_closed_between_models_that_know_the_text(settings):
    """Both models find the text likeliest, and the policy is surer of it than the base model."""
    tokens = held_out_for(settings).batch.tokens

    def knows(certainty):
        def policy(batch):
            # For each masked input, find the text that has most characters in common with it: (M,)
            nearest = (batch.masked[:, None] == tokens).sum(dim=-1).argmax(dim=1)
            logits = certainty * torch.nn.functional.one_hot(tokens[nearest], 28).float()
            return Product(logits, batch, SAMPLING)

        return policy

    result, _ = evaluated(settings, knows(4.0), knows(2.5))
    for name in ("before_argmax", "after_argmax", "reference_sequential_confident"):
        assert result[name]["exact_words"] == 1
    before, after = (result[f"{name}_sample"]["valid_words"] for name in ("before", "after"))
    surest = result["reference_sequential_confident"]["valid_words"]
    assert before < after < surest
    assert result["gap_closed"] == pytest.approx((after - before) / (surest - before))


@pytest.mark.parametrize("make", [product, latent])
def test_entropy_is_that_of_each_blank(settings, make):
    """With a latent, it is the entropy of the blank's mixture over all z."""
    result, _ = evaluated(settings, make(1), make(0))
    batch = held_out_for(settings).batch
    for name, seed in (("before", 0), ("after", 1)):
        seeds = (seed, seed + 10) if make is latent else (seed,)
        prior = torch.tensor([1.0, 2.0][: len(seeds)]).double() ** (1 / 0.8)  # at temperature 0.8
        p = sum(
            weight * (logits_of(each, batch.masked)[batch.mask].double() / 0.8).softmax(dim=-1)
            for weight, each in zip(prior / prior.sum(), seeds)
        )  # (blanks,V)
        want = -(p * p.log()).nan_to_num().sum(dim=-1).mean().item()
        assert result[f"{name}_sample"]["entropy"] == pytest.approx(want, rel=1e-5)


def test_own_rewards_have_columns(settings):
    parts = {"judge": (None, 1.0), "half": (half, 2.0)}
    result, completions = evaluated(settings, product(1), product(0), parts)
    assert result["before_sample"]["reward_half"] == result["after_argmax"]["reward_half"] == 0.5
    assert all(line["reward_half"] == 0.5 for line in completions)
    for rows, columns in ((ROWS, COLUMNS), (SHORT_ROWS, SHORT_COLUMNS)):
        head, *lines = format_table(result, rows, columns).splitlines()
        assert head.endswith("half")
        for when in ("before", "after"):
            (line,) = [x for x in lines if x.startswith(f"{when}, sampled")]
            assert line.endswith("0.500")
    assert "half" not in format_table(evaluated(settings, product(1), product(0))[0])


def rows_of(**changes):
    row = dict.fromkeys(COLUMNS, 0.5)
    result = {name: row for name in ROWS}
    return result | {"before_at_temperatures": [row | {"temperature": 0.2}]} | changes


@pytest.mark.parametrize("gap, shown", [(0.634, ["gap closed: 0.63"]), (None, [])])
def test_there_is_a_gap_only_where_surest_first_is_better(gap, shown):
    lines = format_table(rows_of(gap_closed=gap)).splitlines()
    assert [line[:16] for line in lines if line.startswith("gap")] == shown


def test_a_fooled_judge_is_named():
    line = "the judge prefers these fills to the original text: it is being fooled"
    result = rows_of(gap_closed=None)
    assert line not in format_table(result).splitlines()
    result["after_sample"] = result["after_sample"] | {"judge": 0.51}
    assert line in format_table(result).splitlines()


def test_the_table_says_where_it_is_explained_and_fits_a_terminal():
    result = rows_of(gap_closed=0.5)
    lines = format_table(result, SHORT_ROWS, SHORT_COLUMNS).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines[0]) <= 80 - len("  vowels")  # room for the column of a user's reward
    file, _, section = lines[-1].split()[-1].partition("#")
    heads = [x[3:] for x in Path(file).read_text().splitlines() if x.startswith("## ")]
    assert section in [head.lower().replace(" ", "-") for head in heads]
    full = format_table(result)
    for title in (*ROWS.values(), *COLUMNS.values()):
        assert title.format(temperature=0.2) in full


def test_a_peek_shows_the_text_before_and_now(settings):
    held_out = held_out_for(settings)
    texts = {}
    for name, policy in (("same", product(0)), ("changed", product(1))):
        shown = peek(policy, product(0), held_out, 3).splitlines()[1:]
        texts[name] = [line.split(maxsplit=1) for line in shown]
    titles = [title for title, _ in texts["same"]]
    assert titles[:3] == ["text", "before", "now"] and len(titles) % 3 == 0
    assert texts["same"][1][1] == texts["same"][2][1]
    assert texts["changed"][1] == texts["same"][1] and texts["changed"][2] != texts["same"][2]
    original = texts["same"][0][1].replace("[", "").replace("]", "").strip()
    assert original in {text.strip() for text in decode(held_out.batch.tokens, VOCABULARY)}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_shown_on_a_terminal_alone(settings, monkeypatch):
    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", terminal)
        evaluated(settings, product(0), product(0))
        assert (f"/{len(ROWS)}" in terminal.getvalue()) == terminal.isatty()


def test_the_completions_are_those_after(settings):
    result, completions = evaluated(settings, product(1), product(0))
    mean = sum(line["judge"] for line in completions) / len(completions)
    assert mean == pytest.approx(result["after_sample"]["judge"], abs=1e-5)
    assert mean != pytest.approx(result["before_sample"]["judge"], abs=1e-3)
