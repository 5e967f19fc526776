import torch

from grpo.reward import Rewards, credit, judge_scores, parse_reward, valid_words


def test_scores_are_the_judges_probabilities_whatever_the_batching():
    judge = lambda rows: rows.float() - 2  # noqa: E731
    completions = torch.randint(
        5, (7, 30, 4), generator=torch.Generator().manual_seed(0)
    )  # 210 rows: more than are scored at once
    torch.testing.assert_close(
        judge_scores(judge, completions), (completions.float() - 2).sigmoid()
    )


def test_a_completion_is_judged_once_in_batches_of_one_shape():
    seen = []
    judge = lambda rows: seen.append(rows) or rows.float()  # noqa: E731
    completions = (
        torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6]]).repeat(25, 1).view(4, 25, 2)
    )  # 100 rows, 3 different ones
    judge_scores(judge, completions)
    assert [rows.shape for rows in seen] == [(32, 2)]
    seen.clear()
    judge_scores(judge, torch.arange(140).view(7, 10, 2))  # 70 rows, all different
    assert [rows.shape for rows in seen] == [(32, 2)] * 3


def test_credit():
    scores, mask = (
        torch.tensor([[[0.0, 0.2, 0.4, 0.9, 0.5]]]),
        torch.tensor([[True, True, False, True, False]]),
    )
    torch.testing.assert_close(credit(scores, mask), torch.tensor([[[0.4]]]))
    torch.testing.assert_close(
        credit(scores, mask, "run")[..., mask[0]], torch.tensor([[[0.1, 0.1, 0.9]]])
    )


def test_padding_counts_for_nothing():
    """A prompt padded to any length is credited as it is alone."""
    scores, real = torch.rand(2, 3, 9), torch.ones(2, 1, 9, dtype=torch.bool)
    real[1, :, 5:] = False
    mask = (torch.rand(2, 9) < 0.6) & real[:, 0]
    for by in ("input", "run"):
        have, alone = credit(scores, mask, by, real), credit(scores[1:, :, :5], mask[1:, :5], by)
        torch.testing.assert_close(have[:1], credit(scores[:1], mask[:1], by))
        at = mask[1, :5] if by == "run" else [True]
        torch.testing.assert_close(have[1:, :, : alone.shape[2]][..., at], alone[..., at])
        assert have.isfinite().all()


def test_parts_and_weights():
    assert parse_reward("judge") == {"judge": 1.0}
    assert parse_reward(" valid_words:0.5,a/my.py:f:-0.1,b.py:g,judge:0") == {
        "valid_words": 0.5,
        "a/my.py:f": -0.1,
        "b.py:g": 1.0,
    }


def test_valid_words_by_hand():
    decode = lambda tokens: [
        "".join(" abcdefghijklmnopqrstuvwxyz_"[t] for t in row)
        for row in tokens.reshape(-1, tokens.shape[-1]).tolist()
    ]  # noqa: E731
    encode = lambda *texts: torch.tensor(
        [[" abcdefghijklmnopqrstuvwxyz_".index(c) for c in text] for text in texts]
    )  # noqa: E731
    masked = encode("a c_t __ so")
    completions = encode("a cat on so", "a cxt on so", "a cxt xx so", "a c t on so")[None]
    assert valid_words({"cat", "on", "a"})(completions, masked, masked == 27, decode).tolist() == [
        [1.0, 0.5, 0.0, 0.5]
    ]
    padded = torch.tensor([encode("a c_t")[0].tolist() + [-1, -1]])
    fills = torch.tensor([[encode(text)[0].tolist() + [-1, -1] for text in ("a cat", "a cut")]])
    assert valid_words({"cat"})(fills, padded, padded == 27, decode).tolist() == [
        [1.0, 0.0]
    ]  # the end of a prompt ends its last word


def test_the_sum_is_credited_and_the_parts_are_told():
    """The judge's part per blank, another's on every blank of its completion."""
    rewards = Rewards(lambda rows: rows.float() - 2, "judge:2.0")
    rewards.functions.append(lambda completions, masked, mask, decode: completions.sum(dim=-1))
    rewards.weights.append(0.5), rewards.names.append("total")
    completions, masked = (
        torch.randint(5, (2, 3, 4), generator=torch.Generator().manual_seed(0)),
        torch.zeros(2, 4, dtype=torch.long),
    )
    credits, parts = rewards(completions, masked, masked > 0, "run")
    scores, total = (completions.float() - 2).sigmoid(), completions.sum(dim=-1).float()
    torch.testing.assert_close(
        credits, 2 * credit(scores, masked > 0, "run") + 0.5 * total[..., None]
    )
    torch.testing.assert_close(parts, torch.stack([scores.mean(dim=-1), total], dim=-1))
    torch.testing.assert_close(rewards.total(parts), 2 * scores.mean(dim=-1) + 0.5 * total)
