"""Measure a policy exactly, where all correct answers to an input can be listed.

log q is known, so nothing has to be drawn. With q(y) for each correct answer y of an input,

    correct             Σ_y q(y)                   a draw is one of them
    different_correct   Σ_y 1 − (1 − q(y))¹⁶       how many different ones 16 draws have
    pass@k              1 − (1 − Σ_y q(y))ᵏ        one of k draws is correct

Shapes: N held-out inputs, T characters, n answers to an input.
"""

import torch
from torch import Tensor

from data.vocabulary import encode
from grpo.policy import Product
from grpo.run.load import SAMPLES

PASS_AT = (16, 1024)  # the k of pass@k


def probabilities(q: Product, answers: list[list[str]]) -> list[Tensor]:
    """Compute q(y) of each answer: N lists of n texts -> N tensors (n,)."""
    found = []
    for i, texts in enumerate(answers):
        completions = encode("".join(texts)).view(1, len(texts), -1)  # (1,n,T)
        log_q = q[i : i + 1].log_likelihood(completions.to(q.mask.device))  # (1,n,T)
        found.append(log_q[0].double().sum(dim=-1).exp().cpu())
    return found


def marginals(answers: list[list[str]], mask: Tensor) -> list[Tensor]:
    """Compute q(y) for perfect independent blanks, which is the ceiling for pretraining.

    All answers of an input are equally likely in the data (data/sums/prepare.py). So the best that
    a blank can learn by cross-entropy is its exact marginal over them.
    """
    found = []
    for texts, blanks in zip(answers, mask.cpu()):
        n = len(texts)
        letters = encode("".join(texts)).view(n, -1)[:, blanks].T  # (blanks,n)
        shares = [each.bincount()[each] / n for each in letters]  # of the answers, (n,) each
        found.append(torch.stack(shares).double().prod(dim=0))
    return found


def figures(q: list[Tensor], mask: Tensor) -> dict[str, float]:
    """Average over the inputs, given q(y) of their answers: -> {column: number}."""
    correct = torch.stack([each.sum() for each in q])  # (N,)
    different = torch.stack([(1 - (1 - each) ** SAMPLES).sum() for each in q])  # (N,)
    found = {"correct": correct, "different_correct": different}
    found |= {f"pass@{k}": 1 - (1 - correct.clamp(max=1)) ** k for k in PASS_AT}
    found |= means_by_blanks(correct, mask.cpu())
    return {name: x.mean().item() for name, x in found.items()}


def means_by_blanks(good: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Average good (N,) or (N,n) over the inputs with the same number of blanks."""
    blanks = mask.sum(dim=1)  # (N,)
    return {f"{n} blanks": good[blanks == n].mean() for n in blanks.unique().tolist()}
