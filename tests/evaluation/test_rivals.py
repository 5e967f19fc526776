"""Check the rivals of one-step drawing, which fill the blanks in other ways.

Shapes: N inputs, T characters, V vocabulary.
"""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import BLANK, encode, make_batch, numbers

from grpo.evaluation.rivals import best_by_judge, fill_in_passes, fill_with_common_words
from grpo.latent import Latent
from grpo.policy import Product
from grpo.run.config import Config


def batch_of(masked):
    return make_batch(masked, masked == BLANK, BLANK, 1, (0,))


def neighbors(tokens):
    """A model that looks at a position's two neighbors, and at what stands there."""
    near = torch.stack([tokens.roll(1, dims=1), tokens, tokens.roll(-1, dims=1)])  # (3,N,T)
    logits = sum(w[t] for w, t in zip(numbers(0, 3, 28, 28), near))  # (N,T,28)
    return logits.index_fill(-1, torch.tensor(BLANK), float("-inf"))


def policy(masked):
    return Product(neighbors(masked), masked, masked == BLANK, Config())


@pytest.mark.parametrize("order", ["confidence", "left to right", "right to left"])
@pytest.mark.parametrize("passes, n, mean", [(0, 0, 17 / 3), (1, 3, 1), (2, 0, 2), (6, 0, 5)])
def test_passes_are_a_loop_over_blanks(order, passes, n, mean):
    """The inputs have five, eight and four blanks. Each pass sees what those before it filled."""
    masked = encode("a__b___c", "________", "d_e_f_g_")
    completions, took = fill_in_passes(policy, batch_of(masked), order, passes, n)
    assert took == pytest.approx(mean)
    for row, filled in zip(masked, completions):
        planned = passes or int((row == BLANK).sum())
        for done in range(planned):
            p, best = neighbors(row[None])[0].softmax(dim=-1).max(dim=-1)  # (T,), (T,)
            blanks = (row == BLANK).nonzero().flatten().tolist()
            if order == "confidence":
                blanks.sort(key=lambda t: -p[t])
            if order == "right to left":
                blanks.reverse()
            for t in blanks[: math.ceil(len(blanks) / (planned - done))]:
                row[t] = best[t]
        assert filled.tolist() == [row.tolist()] * max(n, 1)


LETTERS = torch.tensor([[0.8, 0.2, 0.0], [0.4, 0.4, 0.2]])  # (K,3) of a, b and c


def test_all_but_the_last_pass_draw_from_the_policys_marginals():
    """The last pass takes the most likely character. Of two blanks, one is drawn."""
    letters = F.pad(LETTERS.log(), (1, 24), value=-1e9)  # (K,V)

    def policy(masked):
        characters = letters.expand(*masked.shape, *letters.shape)
        return Latent(torch.zeros(len(masked), 2), characters, masked, masked == BLANK, Config())

    filled, _ = fill_in_passes(policy, batch_of(encode("__").repeat(6, 1)), "left to right", n=100)
    assert (filled[..., 1] == 1).all()
    shares = filled[..., 0].flatten().bincount(minlength=4) / 600
    assert shares.tolist() == pytest.approx([0, 0.6, 0.3, 0.1], abs=0.06)


def test_the_best_of_n_is_the_likeliest_in_real_text():
    """Its log p is the base model's log q plus the judge's score."""
    completions = encode("ab", "cb", "ad")[None]  # (1,3,T)
    logits = torch.zeros(1, 2, 28)
    q, scores = Product(logits, None, logits[..., 0] == 0, Config()), torch.tensor([[2.0, 3, 1]])
    assert torch.equal(best_by_judge(q, completions, scores), completions[:, 1:2])
    logits[0, 0, 3] = -6  # now the base model finds a "c" unlikely
    assert torch.equal(best_by_judge(q, completions, scores), completions[:, :1])


def test_the_cheat_writes_the_most_frequent_word_of_each_length():
    """Where no word has this length, it writes only "a"."""
    lexicon = Counter("a dog the a cat the an owl on ox on the ant".split())
    batch = batch_of(encode("the ___ _ on __ b", "___ ____ so zz zz"))
    want = encode("the the a on on b", "the aaaa so zz zz")
    assert torch.equal(fill_with_common_words(batch, lexicon)[:, 0], want)
