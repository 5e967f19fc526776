import pytest
import torch

from grpo.stats import stats, stats_backward, stats_forward

torch.manual_seed(0)
B, G, T, V = 2, 3, 4, 5


def make(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits, ref = (torch.randn(B, T, V, generator=g, dtype=dtype) * 2 for _ in range(2))
    kept = torch.rand(B, T, V, generator=g) < 0.7
    completions = torch.randint(V, (B, G, T), generator=g)
    kept.scatter_(-1, completions.transpose(1, 2), True)  # what was drawn was kept
    mask = torch.tensor([[True, False, True, True], [False, True, True, False]])
    return logits, ref, completions, kept, mask


def slow(logits, ref, completions, kept, mask, temperature):
    """The definition in the design, one blank at a time, differentiated by autograd."""
    logp, ref_logp = (
        torch.zeros(B, G, T, dtype=logits.dtype),
        torch.zeros(B, G, T, dtype=logits.dtype),
    )
    kl, entropy = torch.zeros(B, T, dtype=logits.dtype), torch.zeros(B, T, dtype=logits.dtype)
    for b, t in mask.nonzero().tolist():
        z, zr, S = logits[b, t] / temperature, ref[b, t] / temperature, kept[b, t]
        p, r = z.exp() / z.exp().sum(), zr.exp() / zr.exp().sum()
        q, rs = z.exp() * S / (z.exp() * S).sum(), zr.exp() * S / (zr.exp() * S).sum()
        for j in range(G):
            logp[b, j, t] = q[completions[b, j, t]].log()
            ref_logp[b, j, t] = rs[completions[b, j, t]].log()
        kl[b, t] = sum(p[v] * (p[v] / r[v]).log() for v in range(V) if p[v] > 0)
        entropy[b, t] = -sum(p[v] * p[v].log() for v in range(V) if p[v] > 0)
    return logp, ref_logp, kl, entropy


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_values_and_gradient_equal_the_definition(temperature):
    arguments = make()
    outputs = []
    for fn in (stats, slow):
        logits = arguments[0].clone().requires_grad_()
        values = fn(logits, *arguments[1:], temperature)
        weights = [
            torch.randn(x.shape, generator=torch.Generator().manual_seed(i), dtype=x.dtype)
            for i, x in enumerate(values)
        ]
        loss = sum(
            (w * x).sum() for i, (w, x) in enumerate(zip(weights, values)) if i != 1
        )  # ref_logp has no gradient
        loss.backward()
        outputs.append([*(x.detach() for x in values), logits.grad])
    for a, b in zip(*outputs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    logits, *rest = make()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: [x for i, x in enumerate(stats(z, *rest, 0.8)) if i != 1], (logits,)
    )


def test_banned_characters_and_rows_without_blanks():
    logits, ref, completions, kept, mask = make()
    completions[completions == V - 1] = 0
    logits[..., V - 1] = ref[..., V - 1] = float("-inf")
    kept[..., V - 1], kept[..., 0] = False, True
    logits.requires_grad_()
    logp, ref_logp, kl, entropy = stats(logits, ref, completions, kept, mask, 0.8)
    (logp.sum() + kl.sum() + entropy.sum()).backward()
    assert all(x.isfinite().all() for x in (logp, ref_logp, kl, entropy, logits.grad))
    assert (logits.grad[..., V - 1] == 0).all() and (logits.grad[~mask] == 0).all()
    assert (
        all((x.transpose(1, 2)[~mask] == 0).all() for x in (logp, ref_logp))
        and (kl[~mask] == 0).all()
        and (entropy[~mask] == 0).all()
    )


def test_equal_policies_have_no_kl_and_no_kl_gradient():
    logits, _, *rest = make()
    _, _, kl, _ = stats_forward(logits, logits, *rest, 0.8)
    grad = stats_backward(
        torch.zeros(B, G, T, dtype=logits.dtype),
        torch.ones(B, T),
        torch.zeros(B, T),
        logits,
        logits,
        *rest,
        0.8,
    )
    assert kl.abs().max() == 0 and grad.abs().max() == 0


def test_half_precision_logits_are_summed_in_float32():
    arguments = make()
    logits = arguments[0].bfloat16()
    want = stats(logits.double(), arguments[1].bfloat16().double(), *arguments[2:], 1.0)
    have = stats(logits, arguments[1].bfloat16(), *arguments[2:], 1.0)
    for a, b in zip(have, want):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
