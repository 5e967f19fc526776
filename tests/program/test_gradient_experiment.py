"""Check grpo.experiments.gradient on two sums and a table of logits, where all can be enumerated.

Shapes: T = 8 characters, V vocabulary, R estimates.
"""

import contextlib
import itertools

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


def learner(seed):
    policy = Policy(Table(seed), Product, Config(), contextlib.nullcontext())
    return policy, Optimizer(make_adamw(policy.network, Config(learning_rate=0.1)), 1.0)


COPIES = [learner(0), learner(1)]  # before step 0, and before step 1
NOW, _ = COPIES[1]
RUN = COPIES, COPIES[0][0], POOL


def estimates(flags, times=500):
    return gradient.repeat(f"--group_size=4 {flags}", 1, times, *RUN)


def is_biased(g, truth):
    """Tell whether the 95% interval of the squared bias lies above 0."""
    row = gradient.describe(g, truth)
    assert row["at most"] < row["bias"] + 0.2  # else we'd see nothing
    return row["bias"] ** 2 > row["at most"] ** 2 - row["bias"] ** 2


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
    assert not is_biased(*estimates("--baseline=leave_one_out"))
    g, truth = estimates("--baseline=mean")
    assert is_biased(g, truth) and not is_biased(g * 4 / 3, truth)


def test_only_the_ratio_of_the_whole_completion_makes_up_for_old_draws():
    assert not is_biased(*estimates("--age=1 --objective=reinforce --product"))
    assert is_biased(*estimates("--age=1 --objective=reinforce"))
    assert is_biased(*estimates("--age=1 --clip_eps=1 --clip_eps_high=1e9"))
