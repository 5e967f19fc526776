"""A latent for each run of blanks: everything against the sum over all pairs (z, y).

Letters: T = 3 characters, the first two a run of blanks, or T = 4, of which the last is another;
V = 3 characters, K = 2 values of z, G = 2 completions. Temperature and truncation are on. A policy
here is a pair: the logits of its letters (T,K,V), those of z (K,), or (T,K), alike all over a run.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from grpo.mixture import likeliest, log_prob, log_prob_of_runs, marginal
from grpo.policy import logprobs, sample
from grpo.rollout import Rollout, to_fill
from test_gradient import REWARD, TEMPERATURE, G, V, assert_same, settings

from grpo.advantage import group_advantages
from grpo.logprobs import log_softmax, restrict
from grpo.loss import grpo_loss
from grpo.sampling import Fills
from model.pretrain import with_latent
from model.transformer import IMPOSSIBLE, Generator, TransformerConfig

K, TAU = 2, TEMPERATURE
MASK = torch.tensor([[True, True, False]])
TWO_RUNS = torch.tensor([[True, True, False, True]])


def some_policy(seed, T=3, K=K):
    g = torch.Generator().manual_seed(seed)
    letters = torch.randn(T, K, V, generator=g, dtype=torch.float64)
    return letters, torch.randn(K, generator=g, dtype=torch.float64)


def two_runs():
    letters, prior = some_policy(2, T=4)
    return letters, torch.stack([prior, prior, prior, -2 * prior])


def joint(letters, prior, mask=MASK):
    """What a generator hands over: (1,T,K,V)."""
    both = prior.log_softmax(dim=-1)[..., None] + letters.log_softmax(dim=-1)
    return both * mask[..., None, None]


NOW = some_policy(0)
REFERENCE = some_policy(1)
KEPT = torch.tensor([[[1, 0, 1], [1, 1, 1]], [[1, 1, 0], [0, 1, 1]], [[0, 0, 0], [0, 0, 0]]])
KEPT = KEPT.bool()[None]  # (1,T,K,V), frozen; nothing where there is no blank


def everything(K=K):
    return MASK[..., None, None].repeat(1, 1, K, V)


def chances(policy, kept):
    """P(z, y_0, y_1) of the run, at the temperature, the letters truncated: (K,V,V)."""
    letters, prior = policy
    pi = (prior / TAU).softmax(dim=0)  # (K,)
    q = restrict(log_softmax(letters[:2], TAU), kept[0, :2]).exp()  # (2,K,V)
    return pi[:, None, None] * q[0, :, :, None] * q[1, :, None]


def leaves(policy):
    return [x.clone().requires_grad_() for x in policy]


def expected_gradient(config, kept, reward, policy=NOW, reference=REFERENCE):
    """Σ over groups of P(group) · gradient of the step's loss, by letters and prior."""
    leaf = leaves(policy)
    ref_logits = joint(*reference)
    p = chances(policy, kept)
    total = 0
    for group in itertools.product(p.nonzero().tolist(), repeat=G):  # of (z, y_0, y_1)
        z, *y = torch.tensor(group).T  # (G,) each
        y = torch.stack([*y, 0 * z], dim=1)[None]  # (1,G,3)
        fills = Fills(y, kept, MASK, z[:, None].expand(y.shape))
        found = logprobs(joint(*leaf), ref_logits, fills, config)
        rewards = reward[y[..., 0], y[..., 1]][..., None]  # (1,G,1)
        advantages = group_advantages(rewards, MASK, config)
        old = found._replace(logp=found.logp.detach())
        batch = Rollout(None, fills, ref_logits, old, rewards, advantages)
        total = total + p[*group[0]] * p[*group[1]] * grpo_loss(found, batch, batch, config)[0]
    return torch.autograd.grad(total, leaf)


def gradient_of(value):
    leaf = leaves(NOW)
    return torch.autograd.grad(value(leaf), leaf)


@pytest.mark.parametrize("baseline, factor", [("leave_one_out", 1), ("mean", 1 - 1 / G)])
@pytest.mark.parametrize("level", ["token", "none"])
def test_expected_gradient_is_that_of_the_expected_reward(baseline, factor, level):
    """Prior included, though each blank's ratio is clipped and averaged as without a latent."""
    config = settings(baseline=baseline, importance_sampling_level=level)
    have = expected_gradient(config, KEPT, REWARD)
    want = gradient_of(lambda now: -factor * (chances(now, KEPT).sum(dim=0) * REWARD).sum())
    assert min(x.abs().max() for x in want) > 1e-3
    assert_same(have, want)


def kl_of_pairs(now, reference=REFERENCE):
    p, r = (chances(policy, everything()) for policy in (now, reference))
    return (p * (p / r).log()).sum()


def test_the_penalty_is_the_kl_of_the_pair():
    have = expected_gradient(settings(kl_beta=1.0), everything(), 0 * REWARD)
    assert_same(have, gradient_of(kl_of_pairs))


def test_the_best_policy_of_a_true_log_ratio_is_the_texts_distribution():
    """With kl_beta 1, without a latent: E[log p/q] − KL(π‖q) is −KL(π‖p), greatest at π = p."""
    text, reference = some_policy(4, K=1), some_policy(5, K=1)
    p, q = (chances(policy, everything(K=1))[0] for policy in (text, reference))
    config, kept = settings(kl_beta=1.0), everything(K=1)
    at_best = expected_gradient(config, kept, (p / q).log(), text, reference)
    assert_same(at_best, tuple(map(torch.zeros_like, text)))
    at_start = expected_gradient(config, kept, (p / q).log(), reference, reference)
    assert at_start[0].abs().max() > 1e-2


def test_kl_entropy_and_log_probabilities_are_sums_over_all_pairs():
    p, r = (chances(policy, everything()) for policy in (NOW, REFERENCE))
    fills = Fills(torch.tensor([[[2, 0, 0]]]), everything(), MASK, torch.ones(1, 1, 3).long())
    found = logprobs(joint(*NOW), joint(*REFERENCE), fills, settings())
    torch.testing.assert_close(found.logp.sum(), p[1, 2, 0].log())
    torch.testing.assert_close(found.ref_logp.sum(), r[1, 2, 0].log())
    torch.testing.assert_close(found.kl.sum(), kl_of_pairs(NOW))
    torch.testing.assert_close(found.entropy.sum(), -(p * p.log()).sum())
    assert found.kl[0, 2] == found.entropy[0, 2] == found.logp[0, 0, 2] == 0


def test_the_probability_of_a_fill_sums_over_z_and_multiplies_over_runs():
    letters, prior = two_runs()
    logits = joint(letters, prior, TWO_RUNS)
    fills = torch.tensor(list(itertools.product(range(V), repeat=3)))  # of the blanks
    completions = torch.zeros(1, len(fills), 4, dtype=torch.long)
    completions[0][:, TWO_RUNS[0]] = fills
    pi = (prior / TAU).softmax(dim=-1)  # (T,K)
    q = (letters / TAU).softmax(dim=-1)  # (T,K,V)
    a, b, c = fills.T
    first = (pi[0, :, None] * q[0][:, a] * q[1][:, b]).sum(dim=0)  # (27,)
    second = (pi[3, :, None] * q[3][:, c]).sum(dim=0)  # (27,)
    have = log_prob(logits, completions, TWO_RUNS, TAU)[0].exp()
    torch.testing.assert_close(have, first * second)
    torch.testing.assert_close(have.sum(), torch.ones((), dtype=torch.float64))
    of_runs = log_prob_of_runs(logits, completions, TWO_RUNS, TAU)[0].exp()
    want = torch.stack([first, first, 1 + 0 * first, second], dim=1)
    torch.testing.assert_close(of_runs, want)


def drawn(n, config, policy=NOW, mask=MASK):
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    return sample(joint(*policy, mask), to_fill(tokens, mask, 2, n, (1,)), config)


def test_draws_follow_the_mixture():
    """z is one for a run, drawn for each completion and each run by itself; then the letters."""
    n = 100_000
    fills = drawn(n, settings(top_p=0.9), two_runs(), TWO_RUNS)
    z, y = fills.z[0], fills.completions[0]
    assert torch.equal(z[:, 0], z[:, 1])
    codes = (z[:, 0] * V + y[:, 0]) * V + y[:, 1]
    have = torch.bincount(codes, minlength=K * V * V).view(K, V, V) / n
    letters, prior = two_runs()
    want = chances((letters, prior[0]), fills.kept)
    assert (want == 0).any()
    torch.testing.assert_close(have.double(), want, rtol=0, atol=0.006)
    of_both = torch.bincount(z[:, 0] * K + z[:, 3], minlength=K * K).view(K, K) / n
    pi = (prior / TAU).softmax(dim=-1)  # (T,K)
    torch.testing.assert_close(of_both.double(), pi[0].outer(pi[3]), rtol=0, atol=0.006)


@pytest.mark.parametrize("options", [{"xtc_probability": 1.0}, {"top_k": 1}, {"min_p": 0.5}])
def test_what_was_drawn_was_kept(options):
    config = settings(**options)
    fills = drawn(50, config)
    assert (fills.kept.sum(dim=-1) < V)[MASK].any()
    found = logprobs(joint(*NOW), joint(*REFERENCE), fills, config)
    assert found.logp.isfinite().all() and (found.logp < 0).any()


def test_a_mixture_of_one_is_the_product():
    config = settings(top_p=0.9)
    masked = torch.zeros(1, 3, dtype=torch.long)
    inputs = to_fill(masked, MASK, 2, 9, (1,))
    now, reference = (joint(*some_policy(seed, K=1)) for seed in (3, 4))
    product, product_reference = (some_policy(seed, K=1)[0][None, :, 0] for seed in (3, 4))
    fills, of_product = sample(now, inputs, config), sample(product, inputs, config)
    assert torch.equal(fills.completions, of_product.completions)
    assert torch.equal(fills.kept[:, :, 0], of_product.kept)
    have = logprobs(now, reference, fills, config)
    want = logprobs(product, product_reference, of_product, config)
    torch.testing.assert_close(tuple(have), tuple(want))
    assert torch.equal(*(likeliest(logits, masked, MASK, TAU) for logits in (now, product)))


def test_what_a_blank_says_by_itself_is_the_sum_over_z():
    p = chances(NOW, everything()).sum(dim=0)  # (V,V)
    have = (marginal(joint(*NOW), MASK, TAU)[0, :2] / TAU).softmax(dim=-1)
    torch.testing.assert_close(have, torch.stack([p.sum(dim=1), p.sum(dim=0)]))


def test_the_best_guess_is_the_likeliest_of_what_each_z_would_say():
    for seed in range(8):
        letters, prior = some_policy(seed)
        p = chances((letters, prior), everything()).sum(dim=0)  # (V,V)
        said = [tuple(letters[:2, z].argmax(dim=-1).tolist()) for z in range(K)]
        best = max(said, key=lambda pair: p[pair])  # noqa: B023
        guess = likeliest(joint(letters, prior), torch.full((1, 3), 2), MASK, TAU)
        assert guess.tolist() == [[*best, 2]]


def test_a_letter_that_cannot_be_changes_nothing_and_every_gradient_is_finite():
    """As the mask token: without it all is the same."""
    leaf = leaves(NOW)
    now, reference = joint(*leaf), joint(*REFERENCE)
    fills = Fills(torch.tensor([[[2, 0, 0]]]), everything(), MASK, torch.zeros(1, 1, 3).long())
    gradients = []
    for width in (0, 1):
        given = [F.pad(x, (0, width), value=IMPOSSIBLE) for x in (now, reference)]
        kept = F.pad(fills.kept, (0, width))
        found = logprobs(*given, fills._replace(kept=kept), settings())
        value = found.logp.sum() + found.kl.sum() + found.entropy.sum()
        gradients.append(torch.autograd.grad(value, leaf, retain_graph=True))
    assert all(x.isfinite().all() for x in gradients[1])
    assert_same(*gradients)


def test_logits_that_are_no_numbers_draw_tokens_all_the_same():
    """The run ends with a line that names the logits, not with an IndexError."""
    for z in (0, slice(None)):
        logits = joint(*NOW)
        logits[0, :2, z] = float("nan")
        fills = sample(logits, to_fill(torch.zeros(1, 3).long(), MASK, 2, 50, (1,)), settings())
        for drawn_of, n in ((fills.completions, V), (fills.z, K)):
            assert ((0 <= drawn_of) & (drawn_of < n)).all()
        found = logprobs(logits, joint(*REFERENCE), fills, settings())
        assert found.entropy.sum().isnan()


SHAPE = TransformerConfig(vocab_size=6, block_size=8, n_layer=1, n_head=1, n_embd=16)
TEXT = torch.tensor([[5, 5, 1, 5, 5, 5, 2, 3], [0, 1, 5, 4, 4, 4, 4, 5]])  # 5 is a blank
BLANKS = TEXT == 5


def test_a_generator_says_how_likely_each_pair_is():
    """A prior for a run, letters for each of its blanks, never a blank; nothing elsewhere."""
    torch.manual_seed(0)
    generator = Generator(TransformerConfig(**vars(SHAPE) | {"n_latent": 3}))
    for weight in generator.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    logits = generator(TEXT)
    assert logits.shape == (2, 8, 3, 6) and not logits[~BLANKS].any()
    rows = logits[BLANKS]  # (M,K,V)
    torch.testing.assert_close(rows.logsumexp(dim=(1, 2)), torch.zeros(7), rtol=0, atol=1e-5)
    assert (rows[..., 5].exp() == 0).all()
    priors = rows.logsumexp(dim=2)  # (M,K)
    for a, b in ((0, 1), (2, 3), (3, 4)):
        torch.testing.assert_close(priors[a], priors[b])
    assert (priors[[0, 2, 5]] - priors[[2, 5, 6]]).abs().amax(dim=1).min() > 0.01
    assert (rows[0] - rows[1]).abs().max() > 1e-3


def test_a_latent_begins_as_copies_of_a_product(monkeypatch):
    """A little noise apart; without it no letter is any likelier."""
    torch.manual_seed(0)
    product = Generator(SHAPE)
    apart = with_latent(product, 4)(TEXT)[BLANKS].log_softmax(dim=-1)  # (M,K,V)
    assert (apart - apart[:, :1]).abs().max() > 1e-4
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    have = marginal(with_latent(product, 4)(TEXT), BLANKS, 1.0)[BLANKS]
    torch.testing.assert_close(have.softmax(dim=-1), product(TEXT)[BLANKS].softmax(dim=-1))
