"""Compare log-probability, KL and entropy with definitions, and the gradient with autograd's.

Shapes: B masked inputs, T characters, G completions of each, V vocabulary.
"""

import pytest
import torch

from grpo.policy import ComputeLogProbs, Product
from grpo.run.config import Config

B, G, T, V = 2, 3, 4, 5
NAMES = ("logp", "ref_logp", "kl", "entropy", "gradient")
MASK = torch.tensor([[True, False, True, True], [False, True, True, False]])  # (B,T)


def make():
    """Return logits, ref_logits, completions and mask."""
    g = torch.Generator().manual_seed(0)
    logits, ref_logits = 2 * torch.randn(2, B, T, V, generator=g, dtype=torch.float64)
    completions = torch.randint(V, (B, G, T), generator=g)
    completions[1, :, 3] = -1  # padding
    return logits, ref_logits, completions, MASK


def slow(logits, ref_logits, completions, mask, temperature):
    """Follow the definitions in grpo/policy.py blank by blank. Autograd differentiates them."""
    logp, ref_logp = (torch.zeros(B, G, T, dtype=logits.dtype) for _ in range(2))
    kl, entropy = (torch.zeros(B, T, dtype=logits.dtype) for _ in range(2))
    for b, t in mask.nonzero().tolist():
        weights = [(s[b, t] / temperature).exp() for s in (logits, ref_logits)]
        q, q_ref = (w / w.sum() for w in weights)
        for j in range(G):
            logp[b, j, t] = q[completions[b, j, t]].log()
            ref_logp[b, j, t] = q_ref[completions[b, j, t]].log()
        kl[b, t] = sum(q[v] * (q[v] / q_ref[v]).log() for v in range(V))
        entropy[b, t] = -sum(q[v] * q[v].log() for v in range(V))
    return logp, ref_logp, kl, entropy


def values_and_gradient(function, logits, *given):
    """Return all outputs, and the gradient of a random weighted sum of all but ref_logp."""
    logits = logits.clone().requires_grad_()
    values = function(logits, *given)
    g = torch.Generator().manual_seed(1)
    loss = 0
    for i in (0, 2, 3):  # ref_logp has no gradient
        loss = loss + (torch.randn(values[i].shape, generator=g) * values[i]).sum()
    loss.backward()
    return dict(zip(NAMES, [*(x.detach() for x in values), logits.grad]))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_values_and_gradient_equal_the_definition(temperature):
    have = values_and_gradient(ComputeLogProbs.apply, *make(), temperature)
    want = values_and_gradient(slow, *make(), temperature)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
    logits, _, completions, mask = make()
    q = Product(logits, None, mask, Config(temperature=temperature))
    torch.testing.assert_close(q.log_likelihood(completions), want["logp"])


def test_half_precision_logits_are_summed_in_float32():
    logits, ref_logits, *rest = make()
    logits, ref_logits = logits.bfloat16(), ref_logits.bfloat16()
    want = ComputeLogProbs.apply(logits.double(), ref_logits.double(), *rest, 1.0)
    have = ComputeLogProbs.apply(logits, ref_logits, *rest, 1.0)
    for name, a, b in zip(NAMES, have, want):
        assert a.dtype == torch.float32, name
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
