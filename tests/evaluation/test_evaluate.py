import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import BLANK, encode
from grpo.plumbing.setup import load_data

from data.text.prepare import VOCABULARY
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
from grpo.plumbing.config import Config
from grpo.reward import Rewards


def held_out_of(text, mask, words):
    """One held-out input, with `_` in `mask` where its blanks are."""
    masked = encode(mask)
    return HeldOut(encode(text), masked == BLANK, masked, None, None, VOCABULARY, text, set(words))


def figures_of(text, mask, fills, words):
    return measure(torch.stack([encode(fill) for fill in fills], 1), held_out_of(text, mask, words))


def test_words_by_hand():
    """Of 16 fills of `cat` and `on`: the first word is right 14 times, the second 15 times."""
    fills = ["a cat on a"] * 13 + ["a mat on a", "a xyz on a", "a cat it a"]
    figures = figures_of("a cat on a", "a ___ __ a", fills, {"cat", "mat", "on", "it", "a"})
    want = {
        "valid_words": 31 / 32,
        "exact_words": 29 / 32,
        "distinct_words": 2 / 2,  # of the first fill
        "different_valid_words": (2 + 2) / 2,
        "pass@16": 1,
    }
    assert {name: figures[name] for name in want} == pytest.approx(want)


def test_words_of_one_fill():
    """What is exact need be no word; what is a word need not be exact; a cut one is not counted."""
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
    """Three words are hidden, of which two are one; their fills are one word, and no word."""
    masked = encode("a ___ a ___ a", "a ___ a ___ a")
    tokens = encode("a cat a dog a", "a cat a cat a")
    held_out = HeldOut(tokens, masked == BLANK, masked, None, None, VOCABULARY, "a cat", {"dog"})
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
    """Any numbers: P(real) of a character is a function of the character."""
    return rows.float() / 8 - 1


def half(completions, masked, mask, decode):
    return torch.full(completions.shape, 0.5)


def model(seed):
    """A policy whose logits depend on the position and on what stands there."""
    logits = torch.randn(16, 29, 28, generator=torch.Generator().manual_seed(seed))
    logits[..., BLANK] = float("-inf")
    return lambda tokens: logits[torch.arange(16), tokens]  # (N,16,28)


def held_out_for(config):
    train, val = load_data(config.dataset, config.block_size, config.prompts_file)
    return hold_out(config, train, val, torch.device("cpu"))


def evaluated(config, policy, before, parts=()):
    """The table of a few inputs -> its rows, completions."""
    rewards = Rewards(dict(parts), lambda tokens: [])
    return table(policy, before, judge, rewards, held_out_for(config), config)


def mixture(seed):
    """Of two such policies, the second twice as likely: (N,16,2,28)."""
    both = model(seed), model(seed + 10)
    prior = torch.tensor([[1 / 3], [2 / 3]]).log()
    return lambda tokens: torch.stack([one(tokens).log_softmax(-1) for one in both], 2) + prior


@pytest.mark.parametrize("policy", [model, mixture])
def test_every_row(settings, policy):
    """A policy that has not changed has its rows twice; at its own temperature, thrice."""
    result, completions = evaluated(settings, policy(0), policy(0))
    for name in ("sample", "argmax", "best_of_16"):
        assert result[f"before_{name}"] == result[f"after_{name}"]
    rows = {row["temperature"]: row for row in result["before_at_temperatures"]}
    assert rows[0.8].items() <= (result["before_sample"] | {"temperature": 0.8}).items()
    assert rows[0.2]["different_valid_words"] <= rows[1.0]["different_valid_words"]
    assert result["original"]["exact_words"] == 1
    passes = result["reference_sequential_random"]["forward_passes"]
    blanks = held_out_for(settings).mask.sum(dim=1).float()
    assert passes == pytest.approx(blanks.mean().item())
    assert len(completions) == 6 * 16
    json.dumps(result, allow_nan=False)


def test_the_best_of_16_is_what_judge_and_base_model_together_find_likeliest(settings):
    """Of the policy's fills, each run by itself; `after`, too, it is the base model that counts."""
    result, lines = evaluated(settings, model(1), model(0))
    fills = encode(*(line["completion"] for line in lines)).view(6, 16, 16)
    log_q = model(0)(held_out_for(settings).masked).log_softmax(dim=-1)  # (6,T,V)
    best = []
    for i, line in enumerate(lines[::16]):
        chosen = []
        for run in re.finditer("_+", line["input"]):
            letters = fills[i, :, slice(*run.span())]  # (16,n)
            says = judge(letters).mean(dim=1).clamp(-8, 8)  # (16,)
            q = sum(log_q[i, t, letters[:, t - run.start()]] for t in range(*run.span()))  # (16,)
            chosen += len(run[0]) * [says[(q + says).argmax()].sigmoid()]
        best.append(sum(chosen) / len(chosen))
    assert result["after_best_of_16"]["judge"] == pytest.approx(sum(best).item() / 6)


def test_what_was_before_does_not_depend_on_the_policy(settings):
    result, _ = evaluated(settings, model(1), model(0))
    same, _ = evaluated(settings, model(0), model(0))
    for name in same.keys() - {"gap_closed"}:
        assert (result[name] != same[name]) == name.startswith("after"), name


def test_gap_closed_between_models_that_know_the_text(settings):
    """The likeliest fill is the text, drawn with another certainty."""
    tokens = held_out_for(settings).tokens

    def knows(certainty):
        def policy(asked):
            nearest = (asked[:, None] == tokens).sum(dim=-1).argmax(dim=1)  # (M,) of the inputs
            return certainty * torch.nn.functional.one_hot(tokens[nearest], 28).float()

        return policy

    result, _ = evaluated(settings, knows(4.0), knows(2.5))
    for name in ("before_argmax", "after_argmax", "reference_sequential_confident"):
        assert result[name]["exact_words"] == 1
    before, after = (result[f"{name}_sample"]["valid_words"] for name in ("before", "after"))
    surest = result["reference_sequential_confident"]["valid_words"]
    assert before < after < surest
    assert result["gap_closed"] == pytest.approx((after - before) / (surest - before))


@pytest.mark.parametrize("make", [model, mixture])
def test_entropy_is_that_of_each_blank(settings, make):
    """By itself: with a latent, of the sum over z."""
    result, _ = evaluated(settings, make(1), make(0))
    held_out = held_out_for(settings)
    for name, policy in (("before", make(0)), ("after", make(1))):
        logits = policy(held_out.masked)[held_out.mask].double().view(-1, 1 + (make is mixture), 28)
        prior = (logits.logsumexp(dim=2, keepdim=True) / 0.8).softmax(dim=1)  # (blanks,K,1)
        p = (prior * (logits / 0.8).softmax(dim=-1)).sum(dim=1)  # (blanks,V)
        want = -(p * p.log()).nan_to_num().sum(dim=-1).mean().item()
        assert result[f"{name}_sample"]["entropy"] == pytest.approx(want, rel=1e-5)


def test_own_rewards_have_columns(settings):
    parts = {"judge": (None, 1.0), "half": (half, 2.0)}
    result, completions = evaluated(settings, model(1), model(0), parts)
    assert result["before_sample"]["reward_half"] == result["after_argmax"]["reward_half"] == 0.5
    assert all(line["reward_half"] == 0.5 for line in completions)
    for rows, columns in ((ROWS, COLUMNS), (SHORT_ROWS, SHORT_COLUMNS)):
        head, *lines = format_table(result, rows, columns).splitlines()
        assert head.endswith("reward_half")
        for when in ("before", "after"):
            (line,) = [x for x in lines if x.startswith(f"{when}, one step, sampled")]
            assert line.endswith("0.500")
    assert "reward_" not in format_table(evaluated(settings, model(1), model(0))[0])


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
    file, _, section = lines[-1].split()[-1].partition("#")
    heads = [x[3:] for x in Path(file).read_text().splitlines() if x.startswith("## ")]
    assert section in [head.lower().replace(" ", "-") for head in heads]
    full = format_table(result)
    for title in (*ROWS.values(), *COLUMNS.values()):
        assert title.format(temperature=0.2) in full


def test_a_peek_shows_the_text_before_and_now(settings):
    held_out = held_out_for(settings)
    same = peek(model(0), model(0), held_out, settings, 0).splitlines()[1:]
    changed = peek(model(1), model(0), held_out, settings, 0).splitlines()[1:]
    original = "".join(VOCABULARY[t] for t in held_out.tokens[0])
    assert (
        len(same) == 3 * 5
        and same[0].replace("[", "").replace("]", "").split(maxsplit=1)[1] == original
    )
    assert same[1].replace("before ", "") == same[2].replace("now    ", "")
    assert changed[1] == same[1] and changed[2] != same[2]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_shown_on_a_terminal_alone(settings, monkeypatch):
    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", terminal)
        evaluated(settings, model(0), model(0))
        assert (f"/{len(ROWS)}" in terminal.getvalue()) == terminal.isatty()


def test_the_completions_are_those_after(settings):
    result, completions = evaluated(settings, model(1), model(0))
    mean = sum(line["judge"] for line in completions) / len(completions)
    assert mean == pytest.approx(result["after_sample"]["judge"], abs=1e-5)
    assert mean != pytest.approx(result["before_sample"]["judge"], abs=1e-3)
