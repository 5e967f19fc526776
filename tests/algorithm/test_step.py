"""Run `grpo_step` on extreme inputs, in pieces, and with values that are not finite.

Shapes: B masked inputs, T characters, G completions, V vocabulary.
"""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import PLAIN, make_batch, numbers
from torch.nn.utils import parameters_to_vector

import train_grpo
from grpo import reward
from grpo.loss import grpo_loss
from grpo.metrics import update_metrics
from grpo.optimizer import Optimizer
from grpo.reward import Rewards, judge_scores
from grpo.run.config import Config
from grpo.run.load import make_policy
from model.transformer import TransformerConfig, make_generator

V = 6
VARIANTS = (  # every published variant that has a setting, combined
    {"loss_type": "grpo", "scale_rewards": "batch"},
    {"loss_type": "dapo", "objective": "cispo", "num_iterations": 2},
    {"loss_type": "dapo", "objective": "gspo", "kl_estimator": "k3", "batch_size": 2},
    {"loss_type": "dr_grpo", "baseline": "leave_one_out", "scale_rewards": "none"},
    {"loss_type": "sum", "objective": "reinforce", "kl_estimator": "k1"},
    {"minibatch_size": 2, "top_entropy_quantile": 0.5, "kl_estimator": "k2"},
    {"top_k": 2, "min_p": 0.1, "xtc_probability": 1.0, "entropy_coef": 0.1},
)
EVERY = pytest.mark.parametrize("settings", VARIANTS, ids=str)
BOTH = pytest.mark.parametrize("n_latent", [1, 2])


def some_judge(tokens):
    return torch.sin(3.0 * tokens) * 5


REWARDS = Rewards({"judge": (partial(judge_scores, some_judge), 1.0)})


def make(settings, T, n_latent):
    """Make a config, and a policy and its reference with these settings."""
    own = PLAIN | {"batch_size": 4, "group_size": 4, "top_p": 1.0, "grad_clip": 0.0}
    config = Config(**own | settings)
    torch.manual_seed(0)
    shape = TransformerConfig(V, T, 1, 1, 16, n_latent, blank=V - 1)
    networks = make_generator(shape), make_generator(shape)
    return config, *(make_policy(net, config, torch.device("cpu")) for net in networks)


def step(settings, tokens, mask, rewards=REWARDS, n_latent=1):
    """Take a step of plain gradient descent: -> weights before and after it, rollout, metrics."""
    config, policy, reference = make(settings, tokens.shape[1], n_latent)
    descent = torch.optim.SGD(policy.network.parameters(), lr=1.0)
    optimizer = Optimizer(descent, config.grad_clip)
    batch = make_batch(tokens, mask, V - 1, config.group_size, (1, 0))
    before = parameters_to_vector(policy.network.parameters()).detach()
    rollout, *updates = train_grpo.grpo_step(policy, reference, rewards, optimizer, batch, config)
    metrics = update_metrics(*updates)
    after = parameters_to_vector(policy.network.parameters()).detach()
    assert after.isfinite().all()
    for name, value in metrics.items():
        assert math.isfinite(value), name
    assert (rollout.sample.completions != V - 1).all()  # every blank is filled
    return before, after, rollout, metrics


TEXT = (numbers(2, 4, 8) * 99).long() % (V - 1)  # (B,T)
ALL = torch.ones(4, 8, dtype=torch.bool)


@EVERY
@pytest.mark.parametrize("blanks, T", [(0, 8), (1, 8), (8, 8), (1, 1)])
@BOTH
def test_few_blanks_and_many(settings, blanks, T, n_latent):
    tokens, mask = TEXT[:, :T], (torch.arange(T) < blanks).expand(4, T)
    before, after, rollout, metrics = step(settings, tokens, mask, n_latent=n_latent)
    assert torch.equal(before, after) == (blanks == 0)
    assert (metrics["mean_kl"] > 0) == (metrics["entropy"] > 0) == (blanks > 0)
    given = rollout.sample.completions == tokens[:, None]
    assert (given | mask[:, None]).all()  # the visible characters stay


@pytest.mark.parametrize("size", [1, 3])
@BOTH
def test_pieces_that_fit_in_memory_add_up_to_the_step(size, n_latent):
    """The update is the same with any number of micro-batches. One of the inputs has no blank."""
    mask = TEXT > 2
    mask[1] = False
    for loss_type in ("grpo", "dapo", "dr_grpo", "sum"):
        one = {"loss_type": loss_type, "scale_rewards": "batch"}
        _, want, _, metrics = step(one, TEXT, mask, n_latent=n_latent)
        pieces = one | {"batch_size": size}
        _, have, _, of_pieces = step(pieces, TEXT, mask, n_latent=n_latent)
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-6)
        for name in ("mean_kl", "entropy", "mean_log_prob", "loss"):
            assert of_pieces[name].item() == pytest.approx(metrics[name].item(), rel=1e-4), name


@pytest.mark.parametrize(
    "changes, loss",
    [
        ({"loss_type": "dapo", "minibatch_size": 2}, -1),
        ({"loss_type": "sum", "top_entropy_quantile": 1e-6}, -1 / 4),  # one blank of four inputs
    ],
)
def test_each_update_of_a_step_has_weights_of_its_own(changes, loss):
    """DAPO divides by the blanks of the update, and not by those of the whole step.

    Each advantage is 1 and nothing moves, so an update's loss is minus the sum of the weights of
    the blanks that learn.
    """
    plain = {"baseline": "none", "scale_rewards": "none", "kl_beta": 0, "grad_clip": 1e-9}
    ones = Rewards({"own": (lambda *_: torch.ones(4, 4), 1.0)})
    _, _, _, metrics = step(plain | changes, TEXT, TEXT > 2, ones)
    assert metrics["loss"] == pytest.approx(loss)


def test_later_updates_score_on_the_set_that_was_drawn_from():
    """With top_k=1 this set is one character. Its log-probability is 0 however the policy moves."""
    settings = {"top_k": 1, "num_iterations": 4, "kl_beta": 5.0}
    before, after, _, metrics = step(settings, TEXT, ALL)
    assert not torch.equal(before, after)
    for name in ("mean_log_prob", "approx_kl"):
        assert metrics[name] == 0, name


@EVERY
@BOTH
def test_a_step_never_waits_for_a_gpu(settings, n_latent, monkeypatch):
    """A tensor on the device `meta` has no values, so an operation that needs one fails.

    The step waits once in each update, in the optimizer, and for the metrics at its end.
    """
    monkeypatch.setitem(reward.JUDGE_BATCH, "meta", 3)
    config, *policies = make(settings, 8, n_latent)
    for policy in policies:
        policy.network.to("meta")
        policy.device = torch.device("meta")
    batch = make_batch(TEXT, TEXT > 2, V - 1, 4, (1, 0)).map(lambda x: x.to("meta"))
    optimizer = SimpleNamespace(step_if_finite=lambda loss: loss)
    rollout, *updates = train_grpo.grpo_step(*policies, REWARDS, optimizer, batch, config)
    assert rollout.reward.shape == (4, 4) and update_metrics(*updates)["loss"].is_meta


def test_a_loss_that_is_not_finite_changes_no_weight(monkeypatch):
    """The gradient is finite. Only the first of two micro-batches has such a loss."""
    added = iter([math.inf, 0])

    def spoiled(*given):
        loss, *rest = grpo_loss(*given)
        return loss + next(added), *rest

    monkeypatch.setattr(train_grpo, "grpo_loss", spoiled)
    before, after, *_ = step({"batch_size": 2}, TEXT, ALL)
    assert torch.equal(before, after)
