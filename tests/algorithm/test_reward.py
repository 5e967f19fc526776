"""Check rewards. Shapes: B masked inputs, T characters, G completions of each."""

import math

import pytest
import torch
from conftest import BLANK, encode, make_batch

from data.rules import WordRule
from grpo.reward import (
    Rewards,
    judge_logits,
    log_odds,
    rule_reward,
)
from grpo.run.reward_setting import parse_reward
from grpo.run.user_file import user_reward

PAD = -1


def some_judge(tokens):
    return tokens.float() - 2


def some_completions(*shape):
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(0))


def batch_of(mask):
    """Make a batch with these blanks: mask (B,T)."""
    return make_batch(torch.zeros_like(mask, dtype=torch.long), mask, BLANK, 3, (0,))


def validity(lexicon, masked, *texts):
    """Ask a `WordRule` about B·G texts: masked (B,T) -> (B,G) as lists."""
    tokens = torch.stack([pad(encode(text)[0], masked.shape[1]) for text in texts])
    completions = tokens.view(len(masked), -1, masked.shape[1])  # (B,G,T)
    original = torch.where(masked == BLANK, 1, masked)  # (B,T)
    batch = make_batch(original, masked == BLANK, BLANK, 1, (0,))
    return rule_reward(WordRule(" ".join(lexicon)), completions, batch).tolist()


def pad(tokens, T):
    return torch.cat([tokens, torch.full((T - len(tokens),), PAD)])


@pytest.mark.parametrize("T", [1, 3, 4])  # the shorter, the more completions are equal
def test_logits_are_the_judges_whatever_the_batching(T):
    """There are more completions than are judged at once. Each different one is judged once."""
    completions = some_completions(7, 30, T)
    sizes = []

    def judge(tokens):
        sizes.append(len(tokens))
        return some_judge(tokens)

    assert torch.equal(judge_logits(judge, completions), some_judge(completions))
    different = len(completions.flatten(0, 1).unique(dim=0))
    assert sizes == [32] * math.ceil(different / 32)


def test_valid_words_by_hand():
    completions = "a cat on so", "a cxt on so", "a cxt xx so", "a c t on so"
    have = validity({"cat", "on", "a", "so"}, encode("a c_t __ so"), *completions)
    assert have == [[1.0, 0.5, 0.0, 0.5]]


def test_the_end_of_a_prompt_ends_its_last_word():
    masked = pad(encode("a c_t")[0], 7)[None]
    assert validity({"cat"}, masked, "a cat", "a cut") == [[1.0, 0.0]]


MASK = torch.tensor([[True, True, False, True], [False, True, False, True]])


def test_the_judge_scores_a_word_by_its_mean_logit_which_is_bounded():
    """In the first completion, one word has the logits 5 and -1, and the other word has 20."""
    completions = torch.tensor([[[7, 1, 0, 22], [1, 1, 9, 0]]])  # some_judge subtracts 2
    batch = batch_of(MASK[:1])
    have = log_odds(some_judge, completions, batch)[..., MASK[0]]
    assert have.tolist() == [[[2, 2, 8], [-1, -1, -2]]]
    assert log_odds(some_judge, -completions, batch).min() == -8
    clash = torch.tensor([[[14, 0]]])  # the logits are 12 and -2, and only their mean is bounded
    assert log_odds(some_judge, clash, batch_of(MASK[:1, :2])).tolist() == [[[5, 5]]]


def of_letters(completions, batch):
    return completions.float() ** 2  # (B,G,T)


def of_whole(completions, batch):
    return completions.sum(dim=-1).float()  # (B,G)


def test_a_blank_is_given_its_words_reward():
    """A reward of each letter is averaged over its word, whose length then makes no difference.

    A reward of the whole completion is added to each blank as it is.
    """
    parts = {"letters": (of_letters, 2.0), "whole": (of_whole, -0.5)}
    completions = some_completions(2, 3, 4)  # (B,G,T)
    have, said = Rewards(parts)(completions, batch_of(MASK))

    squares, sums = completions**2, completions.sum(dim=-1)
    for b, words in enumerate([[[0, 1], [3]], [[1], [3]]]):  # the words of each input
        for j in range(3):
            for word in words:
                mean = sum(squares[b, j, t].item() for t in word) / len(word)
                want = 2 * mean - 0.5 * sums[b, j].item()
                for t in word:
                    assert have[b, j, t].item() == pytest.approx(want), f"reward of {(b, j, t)}"

    assert list(said) == ["letters", "whole"]
    assert torch.equal(said["whole"], sums.float()[..., None].expand(2, 3, 4))


def test_an_own_reward_may_write_into_what_it_is_given_and_has_no_gradient():
    def spoil(completions, batch):
        for x in (completions, batch.masked, batch.mask):
            x.zero_()
        return torch.tensor([[1.0, 2.0, 3.0]] * 2, requires_grad=True)

    completions, batch = some_completions(2, 3, 4), batch_of(MASK)
    before = [x.clone() for x in (completions, batch.masked, batch.mask)]
    have = user_reward("spoil", spoil, completions, batch)
    assert have.tolist() == [[1.0, 2.0, 3.0]] * 2 and not have.requires_grad
    assert all(map(torch.equal, (completions, batch.masked, batch.mask), before))


@pytest.mark.parametrize(
    "text, weights",
    [
        ("judge,judge.pt", {"judge": 1.0, "judge.pt": 1.0}),  # a file may be called judge.pt
        ("judge:1e-2, my.py:f:-.5", {"judge": 0.01, "my.py:f": -0.5}),
        (
            "a/b.pt:2.5e+1,my.py:f,valid_words:3.",
            {"a/b.pt": 25.0, "my.py:f": 1.0, "valid_words": 3.0},
        ),
        ("judge:0", {"judge": 0.0}),
    ],
)
def test_a_reward_is_names_and_weights(text, weights):
    assert parse_reward(text) == weights
