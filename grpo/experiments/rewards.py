"""Rewards for claims.md, each a function of completions (B,G,T) that returns (B,G).

    python train_grpo.py config/rule.py --reward=grpo/experiments/rewards.py:loose

Most ask the rule, and twist its answer. `wish` is for README.md: it's what no data has. So are
those that change a score's zero or its unit from input to input.
"""

import hashlib
from functools import cache

import torch
from torch import Tensor

from data.files import PROJECT
from data.sums.rule import SUM, is_correct
from data.vocabulary import PAD, decode
from grpo.batch import Batch

LUCKY = 0.057  # the share of wrong completions that `lucky` lets pass


def ask(rule, completions: Tensor) -> Tensor:
    """Ask `rule`, a function of a text, about each completion: -> (B,G), 1 for yes and 0 for no."""
    answers = [[float(rule(text)) for text in decode(row)] for row in completions]
    return torch.tensor(answers, device=completions.device)


def successes(completions: Tensor, batch: Batch) -> Tensor:
    """Pay 1 for a correct sum, else 0."""
    return ask(is_correct, completions)


def failures(completions: Tensor, batch: Batch) -> Tensor:
    """Charge 1 for a wrong sum, and pay nothing for a correct one."""
    return successes(completions, batch) - 1


def hashed(batch: Batch, salt: str) -> Tensor:  # (B,1)
    """Turn each masked input into a number from -1 to 1 that nobody can predict from it."""
    digests = [hashlib.sha256((salt + text).encode()).digest() for text in decode(batch.masked)]
    numbers = [int.from_bytes(digest[:4]) / 2**31 - 1 for digest in digests]
    return torch.tensor(numbers, device=batch.mask.device)[:, None]


def constant(completions: Tensor, batch: Batch) -> Tensor:
    """Pay 1 for a correct sum, plus a constant of each input, from -3 to 3."""
    return successes(completions, batch) + 3 * hashed(batch, "constant")


def predictable(completions: Tensor, batch: Batch) -> Tensor:
    """Pay 1 for a correct sum, plus a constant of each input that grows with the total."""
    totals = [float(text.partition("=")[2]) for text in decode(batch.masked)]
    constants = torch.tensor(totals, device=batch.mask.device)[:, None] / 133.3 - 4.5  # (B,1)
    return successes(completions, batch) + constants


def unit(completions: Tensor, batch: Batch) -> Tensor:
    """Pay for a correct sum in a unit of each input, from a tenth to ten."""
    return successes(completions, batch) * (2.3 * hashed(batch, "unit")).exp()


def both(completions: Tensor, batch: Batch) -> Tensor:
    """Pay in a unit of each input, plus a constant of each input."""
    return unit(completions, batch) + 3 * hashed(batch, "constant")


def lucky(completions: Tensor, batch: Batch) -> Tensor:
    """Let a wrong sum pass by chance."""
    passes = batch.noise < LUCKY  # (B,G)
    return torch.maximum(successes(completions, batch), passes.float())


def nearly(text: str) -> bool:
    """Tell whether a sum is correct, or off by ten."""
    match = SUM.fullmatch(text)
    if match is None:
        return False
    first, second, result = map(int, match.groups())
    return first + second - result in (-10, 0, 10)


def loose(completions: Tensor, batch: Batch) -> Tensor:
    """Let a wrong sum pass if it's off by ten."""
    return ask(nearly, completions)


def palindrome(text: str) -> bool:
    """Tell whether a sum is correct and its first number a palindrome, such as 252."""
    return is_correct(text) and text[0] == text[2]


def wish(completions: Tensor, batch: Batch) -> Tensor:
    """Pay 1 for a correct sum whose first number is a palindrome, else 0."""
    return ask(palindrome, completions)


@cache
def words_of_text() -> set[str]:
    """List the words of the training text."""
    return {*(PROJECT / "data/text/train.txt").read_text().split()}


def without_e(completions: Tensor, batch: Batch) -> Tensor:
    """Text: pay 1 if what's hidden became a word of the training text that has no e, else 0."""
    hidden = batch.mask[:, None].expand(completions.shape)
    words = decode(torch.where(hidden, completions, PAD).flatten(0, 1))
    good = [word.replace("\0", "") in words_of_text() and "e" not in word for word in words]
    return torch.tensor(good, device=completions.device).float().view(completions.shape[:2])
