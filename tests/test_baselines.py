import math

import pytest
import torch

from grpo.baselines import best_by_run, fill_in_passes, price_of_independence
from grpo.plumbing.config import Config

VOCABULARY = " abcdefghijklmnopqrstuvwxyz_"
BLANK = 27


def encode(*texts):
    return torch.tensor([[VOCABULARY.index(c) for c in text] for text in texts])


def fill(policy, masked, passes, surest=False, seed=0):
    """`fill_in_passes`, whose first pass is made here."""
    logits = policy(masked)
    config = Config(temperature=1.0, top_p=1.0, seed=seed)
    return fill_in_passes(policy, logits, masked, masked == BLANK, passes, config, surest)


def copycat(calls):
    """Sure of the same character as the visible ones; notes what it is asked."""

    def policy(tokens):
        calls.append(tokens.clone())
        seen = torch.where(tokens == BLANK, 0, tokens).amax(dim=1)  # (N,)
        logits = torch.zeros(*tokens.shape, 28)
        logits[..., BLANK] = float("-inf")
        logits[torch.arange(len(tokens)), :, seen] = 60.0
        return logits

    return policy


@pytest.mark.parametrize("surest", [False, True])
def test_blank_by_blank_takes_a_pass_per_blank_and_sees_what_it_filled(surest):
    calls = []
    masked = encode("a____", "bb___")
    fills = fill(copycat(calls), masked, 5, surest)
    assert fills[:, 0].tolist() == encode("aaaaa", "bbbbb").tolist()
    assert [len(c) for c in calls] == [2, 2, 2, 1]  # a finished input is not run again
    assert [(c[0] == BLANK).sum().item() for c in calls] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    "passes, left", [(1, [7]), (2, [7, 3]), (3, [7, 4, 2]), (6, [7, 5, 4, 3, 2, 1])]
)
def test_each_pass_keeps_an_equal_share_of_the_blanks(passes, left):
    calls = []
    masked = encode("a_______", "b_bbbbbb")
    fills = fill(copycat(calls), masked, passes)
    assert fills[:, 0].tolist() == encode("aaaaaaaa", "bbbbbbbb").tolist()
    assert [(c[0] == BLANK).sum().item() for c in calls] == left
    assert [len(c) for c in calls] == [2] + [1] * (passes - 1)


def test_which_blanks_are_kept_is_chosen_at_random():
    kept = set()
    for seed in range(8):
        calls = []
        masked = encode("a____")
        fill(copycat(calls), masked, 2, seed=seed)
        kept.add(tuple((calls[1][0] != BLANK).tolist()))
    assert len(kept) > 2


def test_the_surest_blank_comes_first():
    order = []

    def policy(tokens):
        order.append((tokens[0] == BLANK).nonzero().squeeze(1).tolist())
        logits = torch.zeros(1, 4, 28)
        logits[0, :, 5] = torch.tensor([1.0, 3.0, 2.0, 4.0])
        return logits

    masked = torch.full((1, 4), BLANK)
    fill(policy, masked, 4, surest=True)
    assert order == [[0, 1, 2, 3], [0, 1, 2], [0, 2], [0]]


def test_a_latent_is_filled_from_its_marginal():
    """One z says a .6, c .4, the other b .6, c .4: together c is the likeliest, at .4."""

    def policy(tokens):
        p = torch.zeros(2, 28)
        p[0, 1] = p[1, 2] = 0.6
        p[:, 3] = 0.4
        return p.log()[None, :, None].expand(len(tokens), 2, 1, 28).flatten(0, 1)

    masked = torch.full((400, 1), BLANK)
    fills = fill(policy, masked, 1, surest=True)
    assert (fills == 3).all()
    fills = fill(policy, masked, 1)
    for character, p in ((1, 0.3), (2, 0.3), (3, 0.4)):
        assert abs((fills == character).double().mean().item() - p) < 0.1


def test_best_of_n_takes_each_run_from_the_fill_that_the_judge_likes_best_there():
    masked = encode("the ___ _ on")
    fills = torch.stack([encode("the cat q on"), encode("the xyz a on"), encode("the dog b on")], 1)
    scores = torch.zeros(1, 3, 12)
    scores[0, 0, 4:7] = torch.tensor([0.5, 0.5, 0.5])
    scores[0, 1, 4:7] = torch.tensor([0.9, 0.2, 0.2])  # one good character is not a good word
    scores[0, 1, 8] = 0.7
    scores[0, 2, 0:3] = 1.0  # what is no blank says nothing
    best = best_by_run(fills, scores, masked == BLANK)
    assert best.tolist() == [encode("the cat a on").tolist()[0:1]]


def joint(words, n_latent):
    """The policy that knows: two blanks hide one of `words`, each as likely.

    Given what it sees it answers with each blank's own distribution; a latent has a value per word.
    """

    def policy(tokens):
        rows = []
        for row in tokens.tolist():
            seen = [VOCABULARY[c] for c in row[1:3]]
            fit = [w for w in words if all(s in ("_", c) for s, c in zip(seen, w))]
            for z in range(n_latent):
                p = torch.full((4, 28), 1e-12)
                for word in fit if n_latent == 1 else [fit[z % len(fit)]]:
                    for t, c in enumerate(word):
                        p[1 + t, VOCABULARY.index(c)] += 1
                rows.append(p.log())
        return torch.stack(rows)

    return policy


@pytest.mark.parametrize("n_latent, want", [(1, math.log(2)), (2, 0.0)])
def test_the_price_of_independence_by_hand(n_latent, want):
    """`ab` and `ba`: blank by blank 1/2, in parallel 1/4; a coin makes it 1/2 too."""
    tokens = encode(" ab ", " ba ")
    mask = torch.tensor([[False, True, True, False]] * 2)
    masked = tokens.masked_fill(mask, BLANK)
    policy = joint(["ab", "ba"], n_latent)
    logits = policy(masked)
    price = price_of_independence(policy, logits, tokens, masked, mask, VOCABULARY, 1.0)
    assert price == pytest.approx(want, abs=1e-5)


def test_other_words_stay_hidden_while_one_is_filled():
    asked = []

    def policy(tokens):
        asked.extend("".join(VOCABULARY[c] for c in row) for row in tokens.tolist())
        return torch.zeros(*tokens.shape, 28)

    tokens = encode(" ab cd ")
    mask = tokens > 0
    masked = tokens.masked_fill(mask, BLANK)
    logits = policy(masked)
    asked.clear()
    price = price_of_independence(policy, logits, tokens, masked, mask, VOCABULARY, 1.0)
    assert sorted(asked) == [" __ c_ ", " a_ __ "]  # what the first blanks see is known
    assert price == pytest.approx(0, abs=1e-5)


def test_no_hidden_word_has_no_price():
    tokens = encode("ab")
    mask = torch.tensor([[True, True]])  # cut by the window
    assert (
        price_of_independence(None, torch.zeros(1, 2, 28), tokens, tokens, mask, VOCABULARY, 1)
        is None
    )
