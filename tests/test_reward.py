"""What a completion is worth. Letters: B masked inputs, T characters, G completions of each."""

import numpy as np
import pytest
import torch

from data.masking import make_mask, parse_masking
from grpo.plumbing.checkpoint import model_file, write
from grpo.plumbing.config import Config
from grpo.plumbing.stop import RewardFailed
from grpo.reward import (
    Rewards,
    judge_scores,
    mean_over_input,
    mean_over_run,
    parse_reward,
    valid_words,
)
from model.transformer import Judge, TransformerConfig

ALPHABET = " abcdefghijklmnopqrstuvwxyz_"
BLANK = ALPHABET.index("_")
PAD = -1
CPU = torch.device("cpu")


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


def make_rewards(reward, judge=some_judge, lexicon=frozenset()):
    return Rewards(judge, Config(reward=reward, dtype="float32"), ALPHABET, lexicon, CPU)


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


def test_parts_and_weights():
    assert parse_reward("judge") == {"judge": 1.0}
    assert parse_reward(" valid_words:0.5,a/my.py:f:-0.1,b.py:g,judge:0") == {
        "valid_words": 0.5,
        "a/my.py:f": -0.1,
        "b.py:g": 1.0,
    }
    assert parse_reward("judge:0.5,a/judge_b.pt:0.25") == {"judge": 0.5, "a/judge_b.pt": 0.25}


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


def test_the_sum_is_credited_and_the_parts_are_told(tmp_path):
    """The judge's part per run, another's on every blank of its completion."""
    own = tmp_path / "own.py"
    own.write_text("def total(completions, masked, mask, decode): return completions.sum(dim=-1)")
    rewards = make_rewards(f"judge:2,{own}:total:0.5")
    assert rewards.names == ["judge", "total"]
    completions = some_completions(2, 3, 4)
    masked = torch.zeros(2, 4, dtype=torch.long)
    mask = torch.tensor([[True, True, False, True], [False, True, False, True]])
    scores = scores_of(completions)
    total = completions.sum(dim=-1).float()

    credits, parts = rewards(completions, masked, mask, "run")
    want = 2 * mean_over_run(scores, mask) + 0.5 * total[..., None]
    torch.testing.assert_close(credits, want)
    torch.testing.assert_close(parts, torch.stack([scores.mean(dim=-1), total], dim=-1))
    torch.testing.assert_close(rewards.total(parts), 2 * scores.mean(dim=-1) + 0.5 * total)

    credits, parts_of_input = rewards(completions, masked, mask, "input")
    torch.testing.assert_close(credits, rewards.total(parts)[..., None])
    assert torch.equal(parts, parts_of_input)


def test_a_reward_of_ones_own_may_speak_of_each_character(tmp_path):
    """(B,G,T) is averaged over runs as the judge's view is; (B,G) is every blank's; alone too."""
    own = tmp_path / "own.py"
    own.write_text(
        "def each(completions, masked, mask, decode): return completions / 5\n"
        "def whole(completions, masked, mask, decode): return completions[..., 0] / 5\n"
    )
    completions = some_completions(2, 3, 4)
    masked = torch.zeros(2, 4, dtype=torch.long)
    mask = torch.tensor([[True, True, False, True], [False, True, False, True]])
    each = completions / 5
    whole = completions[..., 0] / 5

    credits, parts = make_rewards(f"{own}:each")(completions, masked, mask, "run")
    torch.testing.assert_close(credits, mean_over_run(each, mask))
    torch.testing.assert_close(parts, each.mean(dim=-1, keepdim=True))

    credits, parts = make_rewards(f"{own}:whole")(completions, masked, mask, "run")
    torch.testing.assert_close(credits, whole[..., None].expand(2, 3, 4))
    torch.testing.assert_close(parts, whole[..., None])


def test_a_second_judge_is_a_setting(tmp_path):
    """Credited per run like the first; its name is that of its file."""
    torch.manual_seed(0)
    second = Judge(TransformerConfig(len(ALPHABET), 8, 1, 1, 16)).eval()
    torch.nn.init.normal_(second.head.weight)
    write(tmp_path / "strict.pt", model_file(second, ALPHABET))
    rewards = make_rewards(f"judge:0.5,{tmp_path}/strict.pt:0.25")
    assert rewards.names == ["judge", "strict"]
    completions = some_completions(2, 3, 8)
    masked = torch.zeros(2, 8, dtype=torch.long)
    mask = torch.tensor([[True, True, False, True, False, False, True, False]] * 2)
    with torch.no_grad():
        seen = second(completions.flatten(0, 1)).sigmoid().view(2, 3, 8)
    credits, parts = rewards(completions, masked, mask, "run")
    first = mean_over_run(scores_of(completions), mask)
    torch.testing.assert_close(credits, 0.5 * first + 0.25 * mean_over_run(seen, mask))
    torch.testing.assert_close(parts[..., 1], seen.mean(dim=-1))


def test_a_judge_without_weight_is_not_asked():
    def judge(tokens):
        raise AssertionError

    rewards = make_rewards("valid_words,judge:0", judge, {"ab"})
    completions = encode(" ab ", " bb ")[None]
    masked = encode(" __ ")
    credits, parts = rewards(completions, masked, masked == BLANK, "input")
    assert rewards.names == ["valid_words"]
    assert credits.tolist() == [[[1.0], [0.0]]]
    assert parts.tolist() == [[[1.0], [0.0]]]


@pytest.mark.parametrize(
    "body, told",
    [
        ("return completions.sum()", r"f returned the shape \(\); it must return \(B, G\) ="),
        ("return completions[:, :1] / 1", r"the shape \(2, 1, 4\); .* = \(2, 3, 4\)"),
        ("return completions[0] * float('nan')", r"the shape \(3, 4\)"),
        ("return completions / 0 * 0", "f returned 24 values that are not finite"),
        ("return completions.nothing", "f failed: AttributeError"),
        ("return 'good'", "f failed: "),
    ],
)
def test_what_is_no_reward_is_named(tmp_path, body, told):
    """Its shape is told where that is wrong, and then nothing of its values."""
    own = tmp_path / "own.py"
    own.write_text(f"def f(completions, masked, mask, decode): {body}")
    masked = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(RewardFailed, match=told) as error:
        make_rewards(f"judge,{own}:f")(some_completions(2, 3, 4), masked, masked == 0, "run")
    assert ("not finite" in str(error.value)) == ("not finite" in told)
