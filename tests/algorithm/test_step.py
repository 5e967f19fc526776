"""`grpo_step` at the edge of what there can be, and whether it learns.

Letters: B masked inputs, T characters, G completions, V vocabulary.
"""

import math
from functools import partial

import pytest
import torch
from conftest import PLAIN
from grpo.rollout import draw_orders, to_fill

import train_grpo
from grpo.logprobs import log_softmax
from grpo.optimizer import Optimizer
from grpo.plumbing.config import Config
from grpo.reward import Rewards, judge_reward
from model.transformer import Generator, TransformerConfig

LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "sum")
VARIANTS = (  # every published form that is a setting, in a few combinations
    {},
    *({"loss_type": name} for name in LOSS_TYPES),
    {"scale_rewards": "batch", "credit": "run"},
    {
        "baseline": "leave_one_out",
        "scale_rewards": "none",
        "importance_sampling_level": "none",
        "kl_estimator": "k1",
    },
    {
        "num_iterations": 2,
        "importance_sampling_level": "sequence",
        "kl_estimator": "k3",
        "credit": "run",
        "batch_size": 2,
    },
    {"minibatch_size": 2, "top_entropy_quantile": 0.5, "clip_delta": 3.0, "kl_estimator": "k2"},
    {"top_k": 2, "min_p": 0.1, "xtc_probability": 1.0, "entropy_coef": 0.1},
)
EVERY = pytest.mark.parametrize("settings", VARIANTS, ids=str)


def some_judge(tokens):
    return torch.sin(3.0 * tokens) * 5


def indifferent_judge(tokens):
    return torch.ones_like(tokens, dtype=torch.float32)


def models(V, T, n_latent=1):
    """-> generator, reference"""
    torch.manual_seed(0)
    shape = TransformerConfig(V, T, 1, 1, 16, n_latent)
    return Generator(shape), Generator(shape)


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])  # a copy


def step(settings, tokens, mask, judge=some_judge, n_latent=1):
    """A step of plain gradient descent with rate 1 -> weights before, after; rollout, metrics."""
    own = PLAIN | {"batch_size": len(tokens), "group_size": 4, "temperature": 0.7, "grad_clip": 0.0}
    config = Config(**(own | {"top_p": 1.0, "kernel": "torch"} | settings))
    V = 6
    generator, reference = models(V, tokens.shape[1], n_latent)
    optimizer = Optimizer(generator, config)
    optimizer.adamw = torch.optim.SGD(generator.parameters(), lr=1.0)
    orders = draw_orders(config.num_iterations, len(tokens), (1, 0))
    inputs = to_fill(tokens, mask, V - 1, config.group_size, (1,))._replace(orders=orders)
    rewards = Rewards({"judge": (partial(judge_reward, judge, "log_odds"), 1.0)}, decode=None)
    before = weights_of(generator)
    rollout, metrics = train_grpo.grpo_step(
        generator, reference, rewards, optimizer, inputs, config
    )
    after = weights_of(generator)
    assert after.isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert (rollout.fills.completions != V - 1).all()  # every blank is filled
    return before, after, rollout, metrics


def text(V, T):
    return torch.randint(V - 1, (4, T), generator=torch.Generator().manual_seed(2))  # (B,T)


@EVERY
def test_no_blank_no_gradient(settings):
    mask = torch.zeros(4, 8, dtype=torch.bool)
    before, after, _, metrics = step(settings, text(6, 8), mask)
    assert torch.equal(before, after)
    assert metrics["loss"] == metrics["mean_kl"] == metrics["entropy"] == 0


@EVERY
@pytest.mark.parametrize("blanks", ["all", "one", "one character"])
@pytest.mark.parametrize("n_latent", [1, 2])
def test_few_blanks_and_many(settings, blanks, n_latent):
    T = 1 if blanks == "one character" else 8
    mask = torch.arange(T).expand(4, T) == 3
    if blanks != "one":
        mask = torch.ones(4, T, dtype=torch.bool)
    tokens = text(6, T)
    before, after, rollout, metrics = step(settings, tokens, mask, n_latent=n_latent)
    assert not torch.equal(before, after)
    assert metrics["mean_kl"] > 0
    given = rollout.fills.completions == tokens[:, None]
    assert (given | mask[:, None]).all()  # what was given stays


@pytest.mark.parametrize(
    "loss_type, share",
    [("grpo", 0.5), ("dapo", 1.0), ("bnpo", 1.0), ("dr_grpo", 0.5), ("sum", 0.5)],
)
def test_an_input_without_blanks_teaches_nothing(loss_type, share):
    """It counts among the inputs, and not among the blanks."""
    tokens = text(6, 8)
    mask = torch.rand(4, 8, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[:2, 0] = True
    mask[2:] = False
    start, alone, *_ = step({"loss_type": loss_type}, tokens[:2], mask[:2])
    _, both, *_ = step({"loss_type": loss_type}, tokens, mask)
    torch.testing.assert_close(both - start, share * (alone - start), rtol=1e-4, atol=1e-6)


@EVERY
def test_equal_rewards_have_no_advantage(settings):
    """Exactly 0; without a penalty nothing moves at all."""
    mask = torch.arange(8).expand(4, 8) % 2 == 0
    free = settings | {"kl_beta": 0.0, "entropy_coef": 0.0}
    before, after, rollout, metrics = step(free, text(6, 8), mask, indifferent_judge)
    assert torch.equal(before, after)
    assert (rollout.advantages == 0).all()
    assert metrics["pg_loss"] == 0
    assert metrics["frac_reward_zero_std"] == 1


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_equal_rewards_leave_the_kl_alone(loss_type):
    """What remains is the gradient of the penalty, as autograd finds it from its definition."""
    tokens = text(6, 8)
    mask = torch.arange(8).expand(4, 8) % 2 == 0
    settings = {"loss_type": loss_type, "kl_beta": 0.3}
    before, after, *_ = step(settings, tokens, mask, indifferent_judge)
    generator, reference = models(6, 8)
    masked = tokens.masked_fill(mask, 5)
    log_p = log_softmax(generator(masked), 0.7)[..., :5]  # (B,T,5)
    log_r = log_softmax(reference(masked), 0.7)[..., :5]  # (B,T,5)
    kl = (log_p.exp() * (log_p - log_r)).sum(dim=-1)  # (B,T)
    per_blank = {"grpo": 16, "dapo": 16, "bnpo": 16, "dr_grpo": 4 * 8, "sum": 4}[loss_type]
    (0.3 * kl[mask].sum() / per_blank).backward()  # every input has 4 blanks
    want = torch.cat([p.grad.flatten() for p in generator.parameters()])
    torch.testing.assert_close(before - after, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{"credit": "input"}, {"credit": "run"}])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("n_latent", [1, 2])
def test_pieces_that_fit_in_memory_add_up_to_the_step(settings, size, n_latent):
    """The same update, however many micro-batches it is computed in."""
    tokens = text(6, 8)
    mask = torch.rand(4, 8, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[:, 0] = True
    for loss_type in ("grpo", "dapo", "dr_grpo", "sum"):
        one = settings | {"loss_type": loss_type, "scale_rewards": "batch"}
        _, want, _, metrics = step(one, tokens, mask, n_latent=n_latent)
        pieces = one | {"batch_size": size}
        _, have, _, of_pieces = step(pieces, tokens, mask, n_latent=n_latent)
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(of_pieces["mean_kl"], metrics["mean_kl"])
        torch.testing.assert_close(of_pieces["loss"], metrics["loss"])


def test_a_gradient_that_is_not_finite_changes_no_weight():
    """Nor do AdamW's moments remember it."""
    generator, _ = models(6, 8)
    optimizer = Optimizer(generator, Config(**PLAIN))
    before = weights_of(generator)
    loss = sum(p.sum() for p in generator.parameters()) * float("nan")
    optimizer.backward(loss)
    assert not optimizer.step().isfinite()
    assert torch.equal(weights_of(generator), before)
    assert not optimizer.adamw.state
    assert all(p.grad is None for p in generator.parameters())


def test_later_updates_score_on_the_set_that_was_drawn_from():
    """With top_k=1: one character, of log-probability 0, wherever the KL moves the policy."""
    mask = torch.ones(4, 8, dtype=torch.bool)
    settings = {"top_k": 1, "num_iterations": 4, "kl_beta": 5.0}
    before, after, _, metrics = step(settings, text(6, 8), mask)
    assert not torch.equal(before, after)
    assert metrics["mean_log_prob"] == metrics["approx_kl"] == 0


def test_every_parameter_learns_at_the_rate_of_the_step():
    """A norm's weight, too: AdamW's first step is the rate itself."""
    generator, _ = models(6, 8)
    optimizer = Optimizer(generator, Config(learning_rate=1.0, grad_clip=0.0, weight_decay=0.0))
    optimizer.set_learning_rate(0.25)
    before = weights_of(generator)
    optimizer.backward(sum(p.sum() for p in generator.parameters()))
    optimizer.step()
    moved = before - weights_of(generator)
    torch.testing.assert_close(moved, torch.full_like(moved, 0.25))
