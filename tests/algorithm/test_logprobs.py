"""Compare log-probability, KL and entropy with definitions, and the gradient with autograd's.

Shapes: B masked inputs, T characters, G completions of each, V vocabulary.
"""

from types import SimpleNamespace

import pytest
import torch

from grpo.policy import Product, compute_logprobs
from grpo.run.config import Config
from model.transformer import IMPOSSIBLE

B, G, T, V = 2, 3, 4, 5
NAMES = ("logp", "ref_logp", "kl", "entropy", "gradient")
MASK = torch.tensor([[True, False, True, True], [False, True, True, False]])  # (B,T)


def make(seed=0):
    """Return logits, ref_logits, completions and mask."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V, generator=g, dtype=torch.float64) * 2
    ref_logits = torch.randn(B, T, V, generator=g, dtype=torch.float64) * 2
    completions = torch.randint(V, (B, G, T), generator=g)
    completions[1, :, 3] = -1  # padding
    return logits, ref_logits, completions, MASK


def ban_last_character(logits, ref_logits, completions, mask):
    """Make the last character as impossible as the blank, and never draw it."""
    logits[..., -1] = IMPOSSIBLE
    ref_logits[..., -1] = IMPOSSIBLE
    completions[completions == V - 1] = 0
    return logits, ref_logits, completions, mask


def slow(logits, ref_logits, completions, mask, temperature):
    """Follow the definitions in grpo/policy.py blank by blank. Autograd differentiates them."""
    logp = torch.zeros(B, G, T, dtype=logits.dtype)
    ref_logp = torch.zeros(B, G, T, dtype=logits.dtype)
    kl = torch.zeros(B, T, dtype=logits.dtype)
    entropy = torch.zeros(B, T, dtype=logits.dtype)
    for b, t in mask.nonzero().tolist():
        weights = (logits[b, t] / temperature).exp()
        ref_weights = (ref_logits[b, t] / temperature).exp()
        q = weights / weights.sum()
        q_ref = ref_weights / ref_weights.sum()
        for j in range(G):
            logp[b, j, t] = q[completions[b, j, t]].log()
            ref_logp[b, j, t] = q_ref[completions[b, j, t]].log()
        kl[b, t] = sum(q[v] * (q[v] / q_ref[v]).log() for v in range(V))
        entropy[b, t] = -sum(q[v] * q[v].log() for v in range(V))
    return logp, ref_logp, kl, entropy


def values_and_gradient(function, arguments, temperature):
    """Return all outputs, and the gradient of a random weighted sum of all but ref_logp."""
    logits = arguments[0].clone().requires_grad_()
    values = function(logits, *arguments[1:], temperature)
    g = torch.Generator().manual_seed(1)
    loss = 0
    for i in (0, 2, 3):  # ref_logp has no gradient
        loss = loss + (torch.randn(values[i].shape, generator=g) * values[i]).sum()
    loss.backward()
    return dict(zip(NAMES, [*(x.detach() for x in values), logits.grad]))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_values_and_gradient_equal_the_definition(temperature):
    have = values_and_gradient(compute_logprobs, make(), temperature)
    want = values_and_gradient(slow, make(), temperature)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
    logits, _, completions, mask = make()
    q = Product(logits, SimpleNamespace(mask=mask), Config(temperature=temperature))
    torch.testing.assert_close(q.log_likelihood(completions), want["logp"])


def test_banned_characters_and_rows_without_blanks():
    logits, *rest = ban_last_character(*make())
    logits.requires_grad_()
    logp, ref_logp, kl, entropy = compute_logprobs(logits, *rest, 0.8)
    (logp.sum() + kl.sum() + entropy.sum()).backward()
    values = (logp.mT, ref_logp.mT, kl, entropy, logits.grad)
    for name, x in zip(NAMES, values):
        assert x.isfinite().all(), name
        assert not x[~MASK].any(), name
    assert not logits.grad[..., V - 1].any()


def test_half_precision_logits_are_summed_in_float32():
    logits, ref_logits, *rest = make()
    logits = logits.bfloat16()
    ref_logits = ref_logits.bfloat16()
    want = compute_logprobs(logits.double(), ref_logits.double(), *rest, 1.0)
    have = compute_logprobs(logits, ref_logits, *rest, 1.0)
    for name, a, b in zip(NAMES, have, want):
        assert a.dtype == torch.float32, name
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
