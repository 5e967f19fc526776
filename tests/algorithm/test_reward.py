"""What a completion is worth. Letters: B masked inputs, T characters, G completions of each."""

from functools import partial

import pytest
import torch
from conftest import BLANK, encode
from grpo.rollout import Inputs

from data.text.prepare import VOCABULARY
from grpo.reward import (
    RewardFailed,
    Rewards,
    judge_logits,
    judge_reward,
    log_odds,
    mean_over_blanks,
    mean_over_run,
    own_reward,
    valid_words,
)
from grpo.sampling import Fills

PAD = -1


def decode(tokens):
    rows = tokens.reshape(-1, tokens.shape[-1]).tolist()
    return ["".join(VOCABULARY[t] for t in row) for row in rows]


def some_judge(tokens):
    return tokens.float() - 2


def some_completions(*shape):
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(0))


def credited(parts, completions, mask, credit):
    """-> the Rewards of these parts, credits and parts: completions (B,G,T), mask (B,T)."""
    rewards = Rewards(parts, decode)
    masked = torch.zeros_like(mask, dtype=torch.long)  # (B,T) no padding
    inputs = Inputs(None, mask, masked, None, None)
    return rewards, *rewards(Fills(completions, None, mask), inputs, credit)


def test_logits_are_the_judges_whatever_the_batching():
    completions = some_completions(7, 30, 4)  # 210 rows: more than are judged at once
    assert torch.equal(judge_logits(some_judge, completions), some_judge(completions))


def test_a_completion_is_judged_once_in_batches_of_one_shape():
    shapes = []

    def judge(rows):
        shapes.append(tuple(rows.shape))
        return rows.float()

    rows = torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6]]).repeat(25, 1)  # 100, 3 different ones
    judge_logits(judge, rows.view(4, 25, 2))
    assert shapes == [(32, 2)]
    shapes.clear()
    judge_logits(judge, torch.arange(140).view(7, 10, 2))  # 70 rows, all different
    assert shapes == [(32, 2)] * 3


def test_means_over_the_input_and_over_runs():
    scores = torch.tensor([[[0.0, 0.2, 0.4, 0.9, 0.5]]])  # (1,1,5)
    mask = torch.tensor([[True, True, False, True, False]])  # (1,5)
    torch.testing.assert_close(mean_over_blanks(scores, mask), torch.tensor([[1.1 / 3]]))
    assert mean_over_blanks(scores, mask & False) == 0  # without a blank no NaN
    of_runs = mean_over_run(scores, mask)[..., mask[0]]
    torch.testing.assert_close(of_runs, torch.tensor([[[0.1, 0.1, 0.9]]]))


def test_valid_words_by_hand():
    masked = encode("a c_t __ so")
    completions = encode("a cat on so", "a cxt on so", "a cxt xx so", "a c t on so")[None]
    words = {"cat", "on", "a", "so"}
    have = valid_words(words, completions, masked, masked == BLANK, decode)
    want = [[1.0, 0.5, 0.0, 0.5]]
    torch.testing.assert_close(have, torch.tensor(want))


def test_a_fill_with_a_space_is_no_word():
    """Whatever stands beside it. Nothing is gained by spaces in the place of words."""
    masked = encode("so ____ __ so")
    fills = ["a on so", "toon on", "on   so", "     so", "       "]
    completions = encode(*(f"so {fill} so" for fill in fills))[None]
    words = {"a", "on", "so", "toon"}
    have = valid_words(words, completions, masked, masked == BLANK, decode)
    torch.testing.assert_close(have, torch.tensor([[0.5, 1.0, 0.5, 0.5, 0.0]]))


def test_a_hidden_space_is_taken_for_a_letter():
    masked = encode(" so_on so ")
    completions = encode(" soxon so ", " so on so ")[None]
    have = valid_words({"so", "on", "soxon"}, completions, masked, masked == BLANK, decode)
    assert have.tolist() == [[1.0, 0.0]]


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
    of_window = valid_words({"on"}, completions, masked, mask, decode)
    assert of_window.tolist() == [[0.0, 0.0]]  # nobody knows how they go on
    own = valid_words({"on"}, completions, masked, mask, decode, cut=False)
    assert own.tolist() == [[1.0, 0.5]]


def total(completions, masked, mask, decode):
    return completions.sum(dim=-1)


MASK = torch.tensor([[True, True, False, True], [False, True, False, True]])


def test_the_judge_speaks_of_a_run_by_its_mean_logit_which_is_bounded():
    """Two runs: logits 5 and -1, and 20; what is visible says nothing."""
    completions = torch.tensor([[[7, 1, 0, 22], [1, 1, 9, 0]]])  # logits: 2 less
    mask = torch.tensor([[True, True, False, True]])
    have = log_odds(some_judge, completions, mask)[..., mask[0]]
    assert have.tolist() == [[[2, 2, 8], [-1, -1, -2]]]
    assert log_odds(some_judge, -completions, mask).min() == -8
    clash = torch.tensor([[[14, 0]]])  # logits 12 and -2: the bound is on their mean
    assert log_odds(some_judge, clash, mask[:, :2]).tolist() == [[[5, 5]]]
    given = (completions, None, mask, None)
    assert torch.equal(judge_reward(some_judge, "log_odds", *given)[..., mask[0]], have)
    p = judge_reward(some_judge, "probability", *given)[..., mask[0]]
    torch.testing.assert_close(p, 1 / (1 + (-have).exp()))


def test_the_weighted_sum_is_credited_and_the_parts_are_given():
    """The judge's part per run, another's on every blank of its completion."""
    judge = partial(judge_reward, some_judge, "log_odds")
    parts = {"judge": (judge, 2.0), "total": (total, 0.5)}
    completions = some_completions(2, 3, 4)
    logits = some_judge(completions)
    of_blanks = mean_over_blanks(logits, MASK)  # (B,G)
    sums = completions.sum(dim=-1).float()  # (B,G)

    rewards, credits, said = credited(parts, completions, MASK, "run")
    torch.testing.assert_close(credits, 2 * mean_over_run(logits, MASK) + 0.5 * sums[..., None])
    torch.testing.assert_close(said, torch.stack([of_blanks, sums], dim=-1))
    torch.testing.assert_close(rewards.total(said), 2 * of_blanks + 0.5 * sums)

    _, credits, same = credited(parts, completions, MASK, "input")
    torch.testing.assert_close(credits, rewards.total(said)[..., None])
    assert torch.equal(said, same)


def test_a_reward_of_ones_own_may_speak_of_each_character():
    """(B,G,T) is averaged over runs as the judge's view is; (B,G) is every blank's; alone too."""
    completions = some_completions(2, 3, 4)
    each = completions / 5
    _, credits, parts = credited({"each": (lambda c, *_: c / 5, 1.0)}, completions, MASK, "run")
    torch.testing.assert_close(credits, mean_over_run(each, MASK))
    torch.testing.assert_close(parts[..., 0], mean_over_blanks(each, MASK))

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
