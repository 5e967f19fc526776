"""Check the rivals of one-step drawing, which fill the blanks in other ways.

Shapes: N inputs, T characters, V vocabulary.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import BLANK, encode, make_batch

from data.per_word import number_words
from data.vocabulary import VOCABULARY
from grpo.evaluation.rivals import (
    best_by_word,
    fill_blank_by_blank,
    fill_with_common_words,
)
from grpo.latent import Latent
from grpo.policy import Product
from grpo.run.config import Config


def batch_of(masked):
    return make_batch(masked, masked == BLANK, BLANK, 1, (0,))


def runs(tokens, mask):
    return number_words(mask)


def fill(logits_of, masked, seed=1, surest=False, n=1):
    """Fill blank by blank with a `Product`. `logits_of` maps tokens (N,T) to logits (N,T,V)."""

    def policy(batch):
        return Product(logits_of(batch.masked), batch, Config())

    return fill_blank_by_blank(policy, batch_of(masked), runs, seed, surest, n)


def copycat(calls):
    """Make a policy that repeats its input's visible character. It adds the tokens to `calls`."""

    def logits_of(tokens):
        calls.append(tokens.clone())
        seen = torch.where(tokens == BLANK, 0, tokens).amax(dim=1)  # (N,)
        logits = torch.zeros(*tokens.shape, 28)
        logits[..., BLANK] = float("-inf")
        logits[torch.arange(len(tokens)), :, seen] = 60.0
        return logits

    return logits_of


def test_blank_by_blank_gives_n_fills_to_each_input():
    masked = encode("a____", "bb___")
    fills = fill(copycat([]), masked, n=3)  # (2,3,T)
    assert fills.tolist() == [encode("aaaaa").tolist() * 3, encode("bbbbb").tolist() * 3]


@pytest.mark.parametrize("surest", [False, True])
def test_blank_by_blank_takes_a_pass_per_blank_and_sees_what_it_filled(surest):
    calls = []
    fills = fill(copycat(calls), encode("a____", "bb___"), surest=surest)
    assert fills[:, 0].tolist() == encode("aaaaa", "bbbbb").tolist()
    assert [len(c) for c in calls] == [2, 2, 2, 1]  # a finished input is not run again
    assert [(c[0] == BLANK).sum().item() for c in calls] == [4, 3, 2, 1]


def test_surest_first_is_a_loop_over_blanks():
    """The test's policy looks at a blank's two neighbours. The loop fills one blank at a time."""
    weights = torch.randn(3, 28, 28, generator=torch.Generator().manual_seed(0))

    def logits_of(tokens):
        near = torch.stack([tokens.roll(1, dims=1), tokens, tokens.roll(-1, dims=1)])  # (3,N,T)
        logits = sum(w[t] for w, t in zip(weights, near))  # (N,T,28)
        return logits.index_fill(-1, torch.tensor(BLANK), float("-inf"))

    masked = encode("a__b___c", "________", "d_e_f_g_")
    fills = fill(logits_of, masked, surest=True)
    for row, fast in zip(masked, fills[:, 0]):
        while (row == BLANK).any():
            p, best = logits_of(row[None])[0].softmax(dim=-1).max(dim=-1)  # (T,), (T,)
            at = p.where(row == BLANK, 0).argmax()
            row[at] = best[at]
        assert row.tolist() == fast.tolist()


P = torch.tensor([0.6, 0.3, 0.1])  # of a, b and c
PRIOR = torch.tensor([0.5, 0.5])
LETTERS = torch.tensor([[0.8, 0.2, 0.0], [0.4, 0.4, 0.2]])  # P is the mean of its rows


@pytest.mark.parametrize("policy_class, p", [(Product, [P]), (Latent, [PRIOR, LETTERS])])
def test_a_blank_is_drawn_from_the_policy_and_from_what_truncation_keeps(policy_class, p):
    """With a latent, it is drawn from the blank's marginal, the sum over z."""
    *prior, letters = [x.log() for x in p]
    tensors = [*prior, F.pad(letters, (1, 24), value=float("-inf"))]  # (V,), or (K,) and (K,V)

    def policy(sampling, batch):
        return policy_class(*(x.expand(600, 1, *x.shape) for x in tensors), batch, sampling)

    batch = batch_of(torch.full((6, 1), BLANK))
    fills = fill_blank_by_blank(partial(policy, Config()), batch, runs, 1, n=100)  # (6,100,1)
    shares = fills.flatten().bincount(minlength=4) / 600
    assert shares.tolist() == pytest.approx([0, 0.6, 0.3, 0.1], abs=0.06)
    fills = fill_blank_by_blank(partial(policy, Config(top_k=2)), batch, runs, 1, n=100)
    assert fills.unique().tolist() == [1, 2]


def test_best_of_n_takes_each_word_from_the_fill_that_is_likeliest_in_the_text():
    """A word's log p is the base model's log q plus the judge's score.

    At first all words have the same log q. The judge scores xyz highest, so xyz is taken. Then the
    base model makes xyz unlikely, and cat is taken instead.
    """
    batch = batch_of(encode("the ___ _ on"))
    fills = torch.stack([encode("the cat q on"), encode("the xyz a on"), encode("the dog b on")], 1)
    scores = torch.zeros(1, 3, 12)
    scores[0, :, 4:7] = torch.tensor([[2.0], [3.0], [1.0]])
    scores[0, 1, 8] = 0.5
    scores[0, 2, 0:3] = 9.0  # the scores of visible characters do not count
    logits = torch.zeros(1, 12, 28)
    best = best_by_word(Product(logits, batch, Config()), fills, scores)
    assert best.tolist() == [encode("the xyz a on").tolist()]
    logits[0, 4, VOCABULARY.index("x")] = -6
    best = best_by_word(Product(logits, batch, Config()), fills, scores)
    assert best.tolist() == [encode("the cat a on").tolist()]


TEXT = "a dog and a cat and an owl saw an ox and an ant"


def test_the_cheat_writes_the_most_frequent_word_of_each_length():
    """Where no word has this length, it writes only "a"."""
    masked = encode("the ___ _ on __ b", "___ ____ so zz zz")
    batch = make_batch(masked, masked == BLANK, BLANK, 2, (0,))
    want = encode("the and a on an b", "and aaaa so zz zz")
    assert torch.equal(fill_with_common_words(batch, TEXT)[:, 0], want)
