import pytest
import torch
import torch.nn.functional as F
from conftest import BLANK, encode
from grpo.evaluation.decoding import best_by_run, fill_blank_by_blank

from data.text.prepare import VOCABULARY
from grpo.plumbing.config import Config


def fill(policy, masked, surest=False, **settings):
    return fill_blank_by_blank(policy, masked, masked == BLANK, Config(**settings), surest)


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
    fills = fill(copycat(calls), encode("a____", "bb___"), surest)
    assert fills[:, 0].tolist() == encode("aaaaa", "bbbbb").tolist()
    assert [len(c) for c in calls] == [2, 2, 2, 1]  # a finished input is not run again
    assert [(c[0] == BLANK).sum().item() for c in calls] == [4, 3, 2, 1]


def test_which_blank_is_filled_is_chosen_at_random():
    first = set()
    for seed in range(8):
        calls = []
        fill(copycat(calls), encode("a____"), seed=seed)
        first.add(tuple((calls[1][0] != BLANK).tolist()))
    assert len(first) > 2


def test_surest_first_is_a_loop_over_blanks():
    """A policy that sees its neighbours; the loop takes one input, one blank, at a time."""
    weights = torch.randn(3, 28, 28, generator=torch.Generator().manual_seed(0))

    def policy(tokens):
        near = torch.stack([tokens.roll(1, dims=1), tokens, tokens.roll(-1, dims=1)])  # (3,N,T)
        logits = sum(w[t] for w, t in zip(weights, near))  # (N,T,28)
        return logits.index_fill(-1, torch.tensor(BLANK), float("-inf"))

    masked = encode("a__b___c", "________", "d_e_f_g_")
    fills = fill(policy, masked, surest=True)
    for row, fast in zip(masked, fills[:, 0]):
        while (row == BLANK).any():
            p, best = policy(row[None])[0].softmax(dim=-1).max(dim=-1)  # (T,), (T,)
            at = p.where(row == BLANK, 0).argmax()
            row[at] = best[at]
        assert row.tolist() == fast.tolist()


@pytest.mark.parametrize("p", [[0.6, 0.3, 0.1], [[0.4, 0.1, 0.0], [0.2, 0.2, 0.1]]])
def test_a_blank_is_drawn_from_the_policy_and_from_what_truncation_keeps(p):
    """With a latent, from what a blank says by itself."""
    logits = F.pad(torch.tensor(p).log(), (1, 24), value=float("-inf"))  # (V,) or (K,V)
    masked = torch.full((600, 1), BLANK)

    def policy(tokens):
        return logits.expand(*tokens.shape, *logits.shape)

    shares = fill(policy, masked).flatten().bincount(minlength=4) / 600
    assert shares.tolist() == pytest.approx([0, 0.6, 0.3, 0.1], abs=0.06)
    assert fill(policy, masked, top_k=2).unique().tolist() == [1, 2]


def test_best_of_n_takes_each_run_from_the_fill_that_is_likeliest_in_the_text():
    """The judge likes xyz best, where the base model finds it rare: log p = log q + log p/q."""
    masked = encode("the ___ _ on")
    fills = torch.stack([encode("the cat q on"), encode("the xyz a on"), encode("the dog b on")], 1)
    odds = torch.zeros(1, 3, 12)
    odds[0, :, 4:7] = torch.tensor([[2.0], [3.0], [1.0]])
    odds[0, 1, 8] = 0.5
    odds[0, 2, 0:3] = 9.0  # what is no blank says nothing
    logits = torch.zeros(1, 12, 28)
    best = best_by_run(logits, fills, odds, masked == BLANK)
    assert best.tolist() == [encode("the xyz a on").tolist()]
    logits[0, 4, VOCABULARY.index("x")] = -6
    best = best_by_run(logits, fills, odds, masked == BLANK)
    assert best.tolist() == [encode("the cat a on").tolist()]
