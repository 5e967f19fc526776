"""Check grpo.experiments.gradient on two sums and a table of logits, where all can be enumerated.

Shapes: T = 8 characters, V vocabulary, R estimates.
"""

import contextlib
import itertools

import pytest
import torch
from conftest import BLANK, encode

from data.sums.rule import is_correct
from data.vocabulary import VOCABULARY
from grpo.batch import make_batch
from grpo.experiments import gradient
from grpo.optimizer import Optimizer, make_adamw
from grpo.policy import Policy, Product
from grpo.run.config import Config

MASKED = ["4_+4_=88", "_4+_4=88"]
DIGITS = "345"  # a table fills blanks with nothing else
POOL = make_batch(encode("44+44=88", "44+44=88"), encode(*MASKED) == BLANK, 1, (1, 1))


class Table(torch.nn.Module):
    """A network that fills each position in the same way, whatever the input."""

    def __init__(self, seed):
        super().__init__()
        self.blank = BLANK
        numbers = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        self.logits = torch.nn.Parameter(numbers.double())  # (T,3)

    def forward(self, masked):
        logits = torch.full((8, len(VOCABULARY)), -1e9, dtype=torch.double)  # (T,V)
        logits[:, [VOCABULARY.index(digit) for digit in DIGITS]] = self.logits
        return logits.expand(len(masked), -1, -1)


NOW = Policy(Table(1), Product, Config(), contextlib.nullcontext())
OPTIMIZER = Optimizer(make_adamw(NOW.network, Config(learning_rate=0.1)), 1.0)


def sizes(flags):
    """Return E g in the direction of the truth, and two standard errors of it."""
    g, truth = gradient.repeat(f"--group_size=4 {flags}", False, NOW, NOW, OPTIMIZER, POOL, 200)
    along = (g * truth).sum(dim=1) / truth.square().sum(dim=1)  # (R,)
    assert gradient.describe(g, truth)["size"] == pytest.approx(along.mean().item(), abs=0.05)
    return along.mean(), 2 * along.std() / 200**0.5


def test_the_exact_gradient_is_that_of_an_enumeration():
    q = NOW.network.logits.softmax(dim=-1)  # (T,3)
    p = []
    for masked in MASKED:
        first, second = masked.index("_"), masked.rindex("_")
        p.append(0)
        for i, j in itertools.product(range(3), repeat=2):
            text = masked.replace("_", DIGITS[i], 1).replace("_", DIGITS[j])
            if is_correct(text):
                p[-1] = p[-1] + q[first, i] * q[second, j]
    (want,) = torch.autograd.grad(sum(p) / 2, NOW.network.logits)
    assert want.abs().max() > 0.01
    torch.testing.assert_close(gradient.exact(NOW, POOL).view(8, 3), want)


def test_leave_one_out_is_unbiased_and_the_mean_too_short_by_one_in_G():
    for baseline, want in {"leave_one_out": 1, "mean": 3 / 4}.items():
        size, margin = sizes(f"--baseline={baseline}")
        assert abs(size - want) < margin < 0.2


def test_the_second_update_starts_from_where_the_first_one_leads():
    before = NOW.network.logits.detach().clone()
    g, truth = gradient.repeat("", True, NOW, NOW, OPTIMIZER, POOL, 2)
    assert torch.equal(NOW.network.logits, before)  # only copies have learned
    assert not torch.equal(truth[0], gradient.exact(NOW, POOL)) and not torch.equal(*truth)
