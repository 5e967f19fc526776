"""Log-probability, KL and entropy against their definitions; a gradient by hand against autograd.

Letters: B masked inputs, T characters, G completions of each, V vocabulary, K values of the latent.
"""

import pytest
import torch

from grpo.plumbing.config import Config
from grpo.rollout import operations
from grpo.stats import marginal_kl, stats, stats_backward, stats_forward

B, G, T, V = 2, 3, 4, 5
MASK = torch.tensor([[True, False, True, True], [False, True, True, False]])  # (B,T)


def make(seed=0):
    """logits, ref_logits, completions, kept, mask"""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V, generator=g, dtype=torch.float64) * 2
    ref_logits = torch.randn(B, T, V, generator=g, dtype=torch.float64) * 2
    kept = torch.rand(B, T, V, generator=g) < 0.7
    completions = torch.randint(V, (B, G, T), generator=g)
    kept.scatter_(-1, completions.transpose(1, 2), True)  # what was drawn was kept
    return logits, ref_logits, completions, kept, MASK


def ban_last_character(logits, ref_logits, completions, kept, mask):
    """As the mask token is: a logit of -inf, never kept, never drawn."""
    logits[..., -1] = float("-inf")
    ref_logits[..., -1] = float("-inf")
    completions[completions == V - 1] = 0
    kept[..., -1] = False
    kept[..., 0] = True
    return logits, ref_logits, completions, kept, mask


def slow(logits, ref_logits, completions, kept, mask, temperature):
    """The definition in the docstring, one blank at a time, differentiated by autograd."""
    logp = torch.zeros(B, G, T, dtype=logits.dtype)
    ref_logp = torch.zeros(B, G, T, dtype=logits.dtype)
    kl = torch.zeros(B, T, dtype=logits.dtype)
    entropy = torch.zeros(B, T, dtype=logits.dtype)
    for b, t in mask.nonzero().tolist():
        weights = (logits[b, t] / temperature).exp()
        ref_weights = (ref_logits[b, t] / temperature).exp()
        S = kept[b, t]
        p = weights / weights.sum()
        r = ref_weights / ref_weights.sum()
        q = weights * S / (weights * S).sum()
        q_ref = ref_weights * S / (ref_weights * S).sum()
        for j in range(G):
            logp[b, j, t] = q[completions[b, j, t]].log()
            ref_logp[b, j, t] = q_ref[completions[b, j, t]].log()
        kl[b, t] = sum(p[v] * (p[v] / r[v]).log() for v in range(V) if p[v] > 0)
        entropy[b, t] = -sum(p[v] * p[v].log() for v in range(V) if p[v] > 0)
    return logp, ref_logp, kl, entropy


def values_and_gradient(function, arguments, temperature):
    """All outputs, and the gradient of a random weighted sum of those that have one."""
    logits = arguments[0].clone().requires_grad_()
    values = function(logits, *arguments[1:], temperature)
    g = torch.Generator().manual_seed(1)
    loss = 0
    for i in (0, 2, 3):  # ref_logp has no gradient
        loss = loss + (torch.randn(values[i].shape, generator=g) * values[i]).sum()
    loss.backward()
    return [*(x.detach() for x in values), logits.grad]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_values_and_gradient_equal_the_definition(temperature):
    have = values_and_gradient(stats, make(), temperature)
    want = values_and_gradient(slow, make(), temperature)
    for a, b in zip(have, want):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    logits, *rest = make()

    def differentiable(z):
        now = stats(z, *rest, 0.8)
        return now.logp, now.kl, now.entropy

    assert torch.autograd.gradcheck(differentiable, (logits.requires_grad_(),))


def test_banned_characters_and_rows_without_blanks():
    logits, *rest = ban_last_character(*make())
    logits.requires_grad_()
    now = stats(logits, *rest, 0.8)
    (now.logp.sum() + now.kl.sum() + now.entropy.sum()).backward()
    assert all(x.isfinite().all() for x in now)
    assert logits.grad.isfinite().all()
    assert (logits.grad[..., V - 1] == 0).all()
    assert (logits.grad[~MASK] == 0).all()
    assert (now.logp.transpose(1, 2)[~MASK] == 0).all()
    assert (now.ref_logp.transpose(1, 2)[~MASK] == 0).all()
    assert (now.kl[~MASK] == 0).all()
    assert (now.entropy[~MASK] == 0).all()


def test_equal_policies_have_no_kl_and_no_kl_gradient():
    logits, _, *rest = make()
    kl = stats_forward(logits, logits, *rest, 0.8).kl
    zeros = torch.zeros(B, G, T, dtype=logits.dtype)
    gradients = (zeros, torch.ones(B, T), torch.zeros(B, T))
    grad = stats_backward(gradients, logits, logits, *rest, 0.8)
    assert kl.abs().max() == 0
    assert grad.abs().max() == 0


def test_half_precision_logits_are_summed_in_float32():
    logits, ref_logits, *rest = make()
    logits = logits.bfloat16()
    ref_logits = ref_logits.bfloat16()
    want = stats(logits.double(), ref_logits.double(), *rest, 1.0)
    have = stats(logits, ref_logits, *rest, 1.0)
    for a, b in zip(have, want):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


# The KL of the mixture's marginals: B·K rows, those of an input side by side.
K = 3


def make_rows(seed=0):
    """logits, ref_logits (B·K,T,V), mask (B·K,T)"""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B * K, T, V, generator=g, dtype=torch.float64) * 2
    ref_logits = torch.randn(B * K, T, V, generator=g, dtype=torch.float64) * 2
    return logits, ref_logits, MASK.repeat_interleave(K, dim=0)


def slow_marginal_kl(logits, ref_logits, mask, temperature):
    """The definition, one blank at a time."""
    kl = torch.zeros(B * K, T, dtype=logits.dtype)
    p = (logits / temperature).softmax(dim=-1)  # (B·K,T,V)
    r = (ref_logits / temperature).softmax(dim=-1)  # (B·K,T,V)
    for row, t in mask.nonzero().tolist():
        first = row - row % K
        m = sum(p[first + z, t] for z in range(K)) / K  # (V,)
        m_ref = sum(r[first + z, t] for z in range(K)) / K  # (V,)
        kl[row, t] = (m * (m / m_ref).log()).sum()
    return kl


def gradient(function, logits, *rest):
    """The values, and the gradient of a random weighted sum of them."""
    leaf = logits.clone().requires_grad_()
    kl = function(leaf, *rest)
    g = torch.Generator().manual_seed(1)
    weights = torch.rand(kl.shape, generator=g, dtype=torch.float64)
    (weights * kl).sum().backward()
    return kl.detach(), leaf.grad


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("banned", [False, True])
def test_kl_of_marginals_equals_the_definition(temperature, banned):
    """Also with a character at -inf, which has neither a KL nor a gradient."""
    logits, ref_logits, mask = make_rows()
    if banned:
        logits[..., -1] = float("-inf")
        ref_logits[..., -1] = float("-inf")
    have, have_gradient = gradient(marginal_kl, logits, ref_logits, mask, K, temperature)
    possible = V - banned  # the definition on those characters alone
    parts = (logits[..., :possible], ref_logits[..., :possible], mask, temperature)
    want, want_gradient = gradient(slow_marginal_kl, *parts)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(have_gradient[..., :possible], want_gradient)
    assert (have_gradient[..., possible:] == 0).all()
    assert (have_gradient[~mask] == 0).all()


def test_a_character_banned_in_some_rows_alone():
    """It is still possible in the mixture, and in its reference."""
    logits, ref_logits, mask = make_rows()
    logits[::K, :, -1] = float("-inf")
    have, have_gradient = gradient(marginal_kl, logits, ref_logits, mask, K, 0.8)
    want, want_gradient = gradient(slow_marginal_kl, logits, ref_logits, mask, 0.8)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(have_gradient, want_gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 1000.0])
def test_kl_of_marginals_is_finite_however_sure_the_rows_are(dtype, spread):
    """Logits a thousand nats apart, as a low temperature makes them: as `stats`, no overflow."""
    logits, ref_logits, mask = make_rows()
    logits = logits.to(dtype)
    logits[..., -1] = float("-inf")
    ref_logits = ref_logits.to(dtype)
    ref_logits[..., -1] = float("-inf")
    have, have_gradient = gradient(marginal_kl, logits, ref_logits, mask, K, 1 / spread)
    assert have.isfinite().all()
    assert (have[mask] > 0).all()
    assert have_gradient.isfinite().all()


def test_with_one_value_it_is_the_kl_of_stats():
    logits, ref_logits, completions, kept, mask = ban_last_character(*make())
    rest = (completions, kept, mask, 0.8)
    have, have_gradient = gradient(marginal_kl, logits, ref_logits, mask, 1, 0.8)
    want, want_gradient = gradient(
        lambda x, ref_x: stats(x, ref_x, *rest).kl,
        logits,
        ref_logits,
    )
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(have_gradient, want_gradient)


def test_rows_that_differ_may_have_equal_marginals():
    """What the KL of marginals allows and the KL of rows does not: each value commits, and together
    they are what the reference is."""
    sure = torch.tensor(
        [[[30.0, 0.0]], [[0.0, 30.0]]]
    )  # (2,1,2): z = 0 says the one, z = 1 the other
    unsure = torch.zeros(2, 1, 2)
    mask = torch.ones(2, 1, dtype=torch.bool)
    assert marginal_kl(sure, unsure, mask, 2, 1.0).abs().max() < 1e-6
    completions = torch.zeros(2, 1, 1, dtype=torch.long)
    kl = stats(sure, unsure, completions, torch.ones(2, 1, 2, dtype=torch.bool), mask).kl
    torch.testing.assert_close(kl, torch.full((2, 1), 2.0).log())


@pytest.mark.parametrize("kl_of", ["row", "marginal"])
def test_operations_differ_in_the_kl_alone(kl_of):
    logits, ref_logits, mask = make_rows()
    g = torch.Generator().manual_seed(2)
    completions = torch.randint(V, (B * K, G, T), generator=g)
    kept = torch.ones(B * K, T, V, dtype=torch.bool)
    _, compute_stats = operations(Config(kl_of=kl_of, kernel="torch"), K)
    arguments = (logits, ref_logits, completions, kept, mask, 0.8)
    have = compute_stats(*arguments)
    want = stats(*arguments)
    assert torch.equal(have.logp, want.logp)
    assert torch.equal(have.ref_logp, want.ref_logp)
    assert torch.equal(have.entropy, want.entropy)
    if kl_of == "marginal":
        assert torch.equal(have.kl, marginal_kl(logits, ref_logits, mask, K, 0.8))
        assert (have.kl[::K] == have.kl[1::K]).all()  # an input's rows share it
        assert (
            have.kl.view(B, K, T).mean(dim=1) <= want.kl.view(B, K, T).mean(dim=1) + 1e-12
        ).all()
    else:
        assert torch.equal(have.kl, want.kl)
