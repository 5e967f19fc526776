"""Compare log-probability, KL, entropy and their gradient with torch.distributions and autograd.

Shapes: B masked inputs, T characters, G completions of each, V vocabulary.
"""

import pytest
import torch
from conftest import BLANK, encode, numbers
from torch.distributions import Categorical, kl_divergence

from grpo.policy import ComputeLogProbs, Product
from grpo.run.config import Config

B, G, T, V = 2, 3, 4, 5
NAMES = ("logp", "ref_logp", "kl", "entropy", "gradient")
LOGITS, REF_LOGITS = 2 * numbers(0, 2, B, T, V)
MASK = encode("_a__", "a__a") == BLANK  # (B,T)
Y = torch.randint(V, (B, G, T), generator=torch.Generator().manual_seed(0))
Y[1, :, 3] = -1  # padding


def by_definition(logits, ref_logits, completions, mask, temperature):
    q, q_ref = (Categorical(logits=x / temperature) for x in (logits, ref_logits))
    y = completions.clamp(min=0).transpose(0, 1)  # (G,B,T)
    logp, ref_logp = (each.log_prob(y).transpose(0, 1) * mask[:, None] for each in (q, q_ref))
    return logp, ref_logp, kl_divergence(q, q_ref) * mask, q.entropy() * mask


def values_and_gradient(function, temperature):
    """Return all outputs, and the gradient of a random weighted sum of all but ref_logp."""
    logits = LOGITS.clone().requires_grad_()
    values = function(logits, REF_LOGITS, Y, MASK, temperature)
    loss = sum((numbers(i, *values[i].shape) * values[i]).sum() for i in (0, 2, 3))
    loss.backward()
    return dict(zip(NAMES, [*(x.detach() for x in values), logits.grad]))


@pytest.mark.parametrize("temperature", [0.7, 2.5])
def test_values_and_gradient_equal_the_definition(temperature):
    have = values_and_gradient(ComputeLogProbs.apply, temperature)
    want = values_and_gradient(by_definition, temperature)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
    q = Product(LOGITS, None, MASK, Config(temperature=temperature))
    torch.testing.assert_close(q.log_likelihood(Y), want["logp"])


def test_half_precision_logits_are_summed_in_float32():
    half = LOGITS.bfloat16(), REF_LOGITS.bfloat16()
    want = ComputeLogProbs.apply(*(x.double() for x in half), Y, MASK, 1.0)
    have = ComputeLogProbs.apply(*half, Y, MASK, 1.0)
    assert all(x.dtype == torch.float32 for x in have)
    torch.testing.assert_close([x.double() for x in have], [*want], rtol=1e-5, atol=1e-6)
