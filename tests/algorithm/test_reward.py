"""What a completion is worth. Letters: B masked inputs, T characters, G completions of each."""

from functools import partial

import numpy as np
import pytest
import torch

from data.masking import make_mask, parse_masking
from grpo.reward import (
    RewardFailed,
    Rewards,
    judge_reward,
    judge_scores,
    mean_over_input,
    mean_over_run,
    own_reward,
    valid_words,
)
from grpo.rollout import Inputs
from grpo.sampling import Fills

ALPHABET = " abcdefghijklmnopqrstuvwxyz_"
BLANK = ALPHABET.index("_")
PAD = -1


def decode(tokens):
    rows = tokens.reshape(-1, tokens.shape[-1]).tolist()
    return ["".join(ALPHABET[t] for t in row) for row in rows]


def encode(*texts):
    """-> (number of texts,T)"""
    return torch.tensor([[ALPHABET.index(c) for c in text] for text in texts])


def some_judge(tokens):
    return tokens.float() - 2


def scores_of(completions):
    """What `some_judge` says of each character."""
    return (completions.float() - 2).sigmoid()


def some_completions(*shape):
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(0))


def credited(parts, completions, mask, credit):
    """-> the Rewards of these parts, credits and parts: completions (B,G,T), mask (B,T)."""
    rewards = Rewards(parts, decode)
    masked = torch.zeros_like(mask, dtype=torch.long)  # (B,T) no padding
    inputs = Inputs(None, mask, masked, None, None)
    return rewards, *rewards(Fills(completions, None, mask), inputs, credit)


def test_scores_are_the_judges_probabilities_whatever_the_batching():
    completions = some_completions(7, 30, 4)  # 210 rows: more than are scored at once
    torch.testing.assert_close(judge_scores(some_judge, completions), scores_of(completions))


def test_a_completion_is_judged_once_in_batches_of_one_shape():
    shapes = []

    def judge(rows):
        shapes.append(tuple(rows.shape))
        return rows.float()

    rows = torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6]]).repeat(25, 1)  # 100, 3 different ones
    judge_scores(judge, rows.view(4, 25, 2))
    assert shapes == [(32, 2)]
    shapes.clear()
    judge_scores(judge, torch.arange(140).view(7, 10, 2))  # 70 rows, all different
    assert shapes == [(32, 2)] * 3


def test_means_over_the_input_and_over_runs():
    scores = torch.tensor([[[0.0, 0.2, 0.4, 0.9, 0.5]]])  # (1,1,5)
    mask = torch.tensor([[True, True, False, True, False]])  # (1,5)
    masked = torch.zeros(1, 5, dtype=torch.long)
    torch.testing.assert_close(mean_over_input(scores, masked), torch.tensor([[0.4]]))
    of_runs = mean_over_run(scores, mask)[..., mask[0]]
    torch.testing.assert_close(of_runs, torch.tensor([[[0.1, 0.1, 0.9]]]))


def test_padding_counts_for_nothing():
    """A prompt padded to any length is credited as it is alone."""
    scores = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(0))
    masked = torch.zeros(2, 9, dtype=torch.long)
    masked[1, 5:] = PAD
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    mask &= masked >= 0

    whole = mean_over_input(scores, masked)
    torch.testing.assert_close(whole[:1], scores[:1].mean(dim=-1))
    torch.testing.assert_close(whole[1:], scores[1:, :, :5].mean(dim=-1))

    of_runs = mean_over_run(scores, mask)
    assert of_runs.isfinite().all()
    torch.testing.assert_close(of_runs[:1], mean_over_run(scores[:1], mask[:1]))
    alone = mean_over_run(scores[1:, :, :5], mask[1:, :5])
    at = mask[1, :5]
    torch.testing.assert_close(of_runs[1:, :, :5][..., at], alone[..., at])


def test_valid_words_by_hand():
    masked = encode("a c_t __ so")
    completions = encode("a cat on so", "a cxt on so", "a cxt xx so", "a c t on so")[None]
    words = {"cat", "on", "a", "so"}
    have = valid_words(words, completions, masked, masked == BLANK, decode)
    want = [[1.0, 0.5, 0.0, 1 / 3]]  # the last one of "c", "t" and "on"
    torch.testing.assert_close(have, torch.tensor(want))


def test_a_space_in_a_fill_makes_two_words_of_it():
    """Both must be words. Nothing is gained by spaces in the place of words."""
    masked = encode("so ____ __ so")
    fills = ["a on so", "a xx so", "toon so", "t on so", "     so", "       "]
    completions = encode(*(f"so {fill} so" for fill in fills))[None]
    words = {"a", "on", "so"}
    have = valid_words(words, completions, masked, masked == BLANK, decode)
    want = [[1.0, 2 / 3, 1 / 2, 2 / 3, 1 / 2, 0.0]]
    torch.testing.assert_close(have, torch.tensor(want))


def test_a_hidden_space_is_filled_rightly():
    """The text itself is all words, whatever of it was hidden."""
    masked = encode(" so_on__so ")
    completions = encode(" so on  so ", " soxon  so ", " so onxxso ")[None]
    have = valid_words({"so", "on"}, completions, masked, masked == BLANK, decode)
    torch.testing.assert_close(have, torch.tensor([[1.0, 0.5, 0.5]]))


@pytest.mark.parametrize("masking", ["random", "span", "sticky", "word"])
def test_the_original_text_is_all_words(masking):
    """Under every masking: not a fill that is right is held against it."""
    text = " the cat sat on a mat and the dog ran to us "
    tokens = encode(text)  # (1,T)
    rng = np.random.default_rng(0)
    spaces = (tokens == 0).numpy()
    for _ in range(20):
        hidden = make_mask(spaces, parse_masking(masking), 0.3, 2, rng)
        hidden[:, [0, -1]] = False  # the window cuts no word
        mask = torch.from_numpy(hidden)
        masked = tokens.masked_fill(mask, BLANK)
        have = valid_words(set(text.split()), tokens[:, None], masked, mask, decode)
        assert have.item() == 1 or not hidden.any()


def test_visible_punctuation_ends_a_word():
    def decode_with_commas(tokens):
        return [text.replace("z", ",") for text in decode(tokens)]

    masked = encode(" c_tz so ")
    completions = encode(" catz so ", " cutz so ")[None]
    have = valid_words({"cat"}, completions, masked, masked == BLANK, decode_with_commas)
    assert have.tolist() == [[1.0, 0.0]]


def test_words_that_the_windows_edge_cuts_do_not_count():
    """Nobody knows how they go on: not what reaches the first or the last character."""
    masked = encode("_n on _n")
    completions = encode("on on on", "xn on xn")[None]
    have = valid_words({"on"}, completions, masked, masked == BLANK, decode)
    assert have.tolist() == [[0.0, 0.0]]


def test_the_end_of_a_prompt_ends_its_last_word():
    padding = [PAD, PAD]
    masked = torch.tensor([encode("a c_t")[0].tolist() + padding])
    rows = [encode(text)[0].tolist() + padding for text in ("a cat", "a cut")]
    completions = torch.tensor([rows])
    have = valid_words({"cat"}, completions, masked, masked == BLANK, decode)
    assert have.tolist() == [[1.0, 0.0]]


def test_a_prompts_first_and_last_word_count():
    """A window may cut its outer words; a prompt begins and ends where its writer meant it to."""
    masked = encode("_n on o_")
    completions = encode("on on on", "xn on on")[None]
    mask = masked == BLANK
    own = valid_words({"on"}, completions, masked, mask, decode, cut=False)
    assert own.tolist() == [[1.0, 0.5]]


def total(completions, masked, mask, decode):
    return completions.sum(dim=-1)


MASK = torch.tensor([[True, True, False, True], [False, True, False, True]])


def test_the_weighted_sum_is_credited_and_the_parts_are_given():
    """The judge's part per run, another's on every blank of its completion."""
    parts = {"judge": (partial(judge_reward, some_judge), 2.0), "total": (total, 0.5)}
    completions = some_completions(2, 3, 4)
    scores = scores_of(completions)
    sums = completions.sum(dim=-1).float()  # (B,G)

    rewards, credits, said = credited(parts, completions, MASK, "run")
    torch.testing.assert_close(credits, 2 * mean_over_run(scores, MASK) + 0.5 * sums[..., None])
    torch.testing.assert_close(said, torch.stack([scores.mean(dim=-1), sums], dim=-1))
    torch.testing.assert_close(rewards.total(said), 2 * scores.mean(dim=-1) + 0.5 * sums)

    _, credits, same = credited(parts, completions, MASK, "input")
    torch.testing.assert_close(credits, rewards.total(said)[..., None])
    assert torch.equal(said, same)


def test_a_reward_of_ones_own_may_speak_of_each_character():
    """(B,G,T) is averaged over runs as the judge's view is; (B,G) is every blank's; alone too."""
    completions = some_completions(2, 3, 4)
    each = completions / 5
    _, credits, parts = credited({"each": (lambda c, *_: c / 5, 1.0)}, completions, MASK, "run")
    torch.testing.assert_close(credits, mean_over_run(each, MASK))
    torch.testing.assert_close(parts, each.mean(dim=-1, keepdim=True))

    whole = completions[..., 0] / 5
    _, credits, parts = credited(
        {"whole": (lambda c, *_: c[..., 0] / 5, 1.0)}, completions, MASK, "run"
    )
    torch.testing.assert_close(credits, whole[..., None].expand(2, 3, 4))
    torch.testing.assert_close(parts, whole[..., None])


def test_an_own_reward_may_write_into_what_it_is_given():
    def spoil(completions, masked, mask, decode):
        completions.zero_()
        return [[1.0, 2.0, 3.0]] * 2

    completions = some_completions(2, 3, 4)
    before = completions.clone()
    have = own_reward("spoil", spoil, completions, MASK.long(), MASK, decode)
    assert have.tolist() == [[1.0, 2.0, 3.0]] * 2
    assert torch.equal(completions, before)


def raises(completions, *_):
    return completions.nothing


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda c, *_: c.sum(), r"f returned \(\) numbers.* it must return \(B, G\) = \(2, 3\)"),
        (lambda c, *_: c[:, :1] / 1, r"returned \(2, 1, 4\) numbers"),
        (lambda c, *_: c / 0, "not finite"),
        (lambda *_: "good", "f failed: "),
        (raises, "f failed: AttributeError"),
    ],
)
def test_what_is_no_reward_is_named(function, message):
    with pytest.raises(RewardFailed, match=message):
        own_reward("f", function, some_completions(2, 3, 4), MASK.long(), MASK, decode)


def test_valid_words_reads_each_input_with_its_own_blanks():
    masked = encode("so ___ on so", "so cat __ so")  # (2,T)
    completions = encode("so cat on so", "so xxx on so", "so cat on so", "so cat xx so")
    completions = completions.view(2, 2, -1)
    have = valid_words({"so", "on", "cat"}, completions, masked, masked == BLANK, decode)
    assert have.tolist() == [[1.0, 0.0], [1.0, 0.0]]
