import torch

from grpo.reward import credit, judge_scores


def test_scores_are_the_judges_probabilities_whatever_the_batching():
    judge = lambda rows: rows.float() - 2  # noqa: E731
    completions = torch.randint(5, (7, 30, 4), generator=torch.Generator().manual_seed(0))  # 210 rows: more than are scored at once
    torch.testing.assert_close(judge_scores(judge, completions), (completions.float() - 2).sigmoid())


def test_credit():
    scores = torch.tensor([[[0.0, 0.2, 0.4, 0.9]]])
    torch.testing.assert_close(credit(scores, 0), torch.tensor([[[0.375]]]))
    torch.testing.assert_close(credit(scores, 1), torch.tensor([[[0.1, 0.2, 0.5, 0.65]]]))  # the ends average over what is there
    torch.testing.assert_close(credit(scores, 9), torch.full((1, 1, 4), 0.375))
