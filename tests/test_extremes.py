"""Inputs and rewards at the edge of what there can be: what comes out is finite and right, whatever
the settings.

Letters: B masked inputs, T characters, V vocabulary, K values of the latent.
"""

import json

import pytest
import torch

import train_grpo
from grpo.advantage import group_advantages
from grpo.optimizer import Optimizer
from grpo.plumbing.checkpoint import model_file, write
from grpo.plumbing.config import Config
from grpo.plumbing.log import Clock
from grpo.plumbing.setup import forward
from grpo.reward import Rewards
from grpo.rollout import Inputs, draw_orders, draw_uniforms
from grpo.stats import log_softmax
from model.transformer import Generator, Judge, TransformerConfig
from tests.conftest import PLAIN, command_line

CPU = torch.device("cpu")
VARIANTS = (
    {},
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
        "gradient_accumulation_steps": 2,
        "batch_size": 2,
    },
    {"minibatch_size": 2, "top_entropy_quantile": 0.5, "clip_delta": 3.0, "kl_estimator": "k2"},
    {
        "top_k": 2,
        "min_p": 0.1,
        "xtc_probability": 1.0,
        "repetition_penalty": 1.3,
        "entropy_coef": 0.1,
    },
)
LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "sum")
SETTINGS = [{"loss_type": name, **more} for name in LOSS_TYPES for more in VARIANTS]
LATENTS = [(settings, 1) for settings in SETTINGS]
LATENTS += [({"loss_type": "grpo", **more}, 2) for more in VARIANTS]
LATENTS += [({"kl_of": "marginal"}, 2), ({"kl_of": "marginal", "credit": "run"}, 4)]
EVERY = pytest.mark.parametrize("settings, K", LATENTS, ids=str)


def some_judge(tokens):
    return torch.sin(3.0 * tokens) * 5


def indifferent_judge(tokens):
    return torch.ones_like(tokens, dtype=torch.float32)


def models(V, T, K=1):
    """-> generator, reference"""
    torch.manual_seed(0)
    shape = TransformerConfig(V, T, 1, 1, 16, n_latent=K)
    return Generator(shape), Generator(shape)


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])  # a copy


def step(settings, tokens, mask, judge=some_judge, V=6, K=1):
    """A step of plain gradient descent with rate 1 -> weights before, after; rollout, metrics."""
    own = PLAIN | {"batch_size": len(tokens), "group_size": 4, "temperature": 0.7, "grad_clip": 0.0}
    config = Config(**(own | {"top_p": 1.0} | settings))
    generator, reference = models(V, tokens.shape[1], K)
    optimizer = Optimizer(generator, config)
    optimizer.adamw = torch.optim.SGD(generator.parameters(), lr=1.0, fused=True)
    uniforms = draw_uniforms(len(tokens), config.group_size, tokens.shape[1], (1,))
    orders = draw_orders(config.num_iterations, len(tokens), (1, 0))
    inputs = Inputs(tokens, mask, tokens.masked_fill(mask, V - 1), uniforms, orders)
    before = weights_of(generator)
    rollout, metrics = train_grpo.grpo_step(
        forward(generator, CPU, config),
        forward(reference, CPU, config),
        Rewards(judge, config, "abcdefg"[:V], set(), CPU),
        optimizer,
        inputs,
        config,
        Clock(CPU),
    )
    after = weights_of(generator)
    assert after.isfinite().all()
    assert all(value.isfinite() for value in metrics.values()), metrics
    assert (rollout.completions != V - 1).all()  # every blank is filled
    return before, after, rollout, metrics


def text(V, T):
    return torch.randint(V - 1, (4, T), generator=torch.Generator().manual_seed(2))  # (B,T)


@EVERY
def test_no_blank_no_gradient(settings, K):
    mask = torch.zeros(4, 8, dtype=torch.bool)
    before, after, _, metrics = step(settings, text(6, 8), mask, K=K)
    assert torch.equal(before, after)
    assert metrics["loss"] == metrics["mean_kl"] == metrics["entropy"] == 0


@EVERY
def test_all_blanks_one_blank_and_one_character(settings, K):
    cases = (
        (text(6, 8), torch.ones(4, 8, dtype=torch.bool)),
        (text(6, 8), torch.arange(8).expand(4, 8) == 3),
        (text(6, 1), torch.ones(4, 1, dtype=torch.bool)),
    )
    for tokens, mask in cases:
        before, after, rollout, metrics = step(settings, tokens, mask, K=K)
        assert not torch.equal(before, after)
        assert metrics["mean_kl"] > 0
        fills = rollout.completions.reshape(4, 4, -1)  # (B,G,T)
        assert ((fills == tokens[:, None]) | mask[:, None]).all()  # what was given stays


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize(
    "loss_type, share",
    [("grpo", 0.5), ("dapo", 1.0), ("bnpo", 1.0), ("dr_grpo", 0.5), ("sum", 0.5)],
)
def test_an_input_without_blanks_teaches_nothing(loss_type, share, K):
    """It counts among the inputs, and not among the blanks."""
    tokens = text(6, 8)
    mask = torch.rand(4, 8, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[:2, 0] = True
    mask[2:] = False
    start, alone, *_ = step({"loss_type": loss_type}, tokens[:2], mask[:2], K=K)
    _, both, *_ = step({"loss_type": loss_type}, tokens, mask, K=K)
    torch.testing.assert_close(both - start, share * (alone - start), rtol=1e-4, atol=1e-6)


@EVERY
def test_two_characters_of_which_one_is_the_blank(settings, K):
    """There is but one fill: it is certain, so nothing is learned."""
    mask = torch.arange(8).expand(4, 8) % 3 == 0
    before, after, rollout, metrics = step(settings, text(2, 8), mask, V=2, K=K)
    assert torch.equal(before, after)
    assert (rollout.completions == 0).all()
    assert metrics["mean_log_prob"] == metrics["entropy"] == metrics["mean_kl"] == 0
    assert metrics["dead_groups_foretold"] == 1


@EVERY
def test_equal_rewards_have_no_advantage(settings, K):
    """Exactly 0; without a penalty nothing moves at all."""
    mask = torch.arange(8).expand(4, 8) % 2 == 0
    free = settings | {"kl_beta": 0.0, "entropy_coef": 0.0}
    before, after, rollout, metrics = step(free, text(6, 8), mask, indifferent_judge, K=K)
    assert torch.equal(before, after)
    assert (rollout.advantages == 0).all()
    assert metrics["pg_loss"] == 0
    assert metrics["frac_reward_zero_std"] == 1


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("K, kl_of", [(1, "row"), (2, "row"), (2, "marginal")])
def test_equal_rewards_leave_the_kl_alone(loss_type, K, kl_of):
    """What remains is the gradient of the penalty, as autograd finds it from its definition."""
    tokens = text(6, 8)
    mask = torch.arange(8).expand(4, 8) % 2 == 0
    settings = {"loss_type": loss_type, "kl_of": kl_of, "kl_beta": 0.3}
    before, after, *_ = step(settings, tokens, mask, indifferent_judge, K=K)
    generator, reference = models(6, 8, K)
    masked = tokens.masked_fill(mask, 5)
    log_p = log_softmax(generator(masked), 0.7)[..., :5].unflatten(0, (4, K))  # (B,K,T,5)
    log_r = log_softmax(reference(masked), 0.7)[..., :5].unflatten(0, (4, K))  # (B,K,T,5)
    if kl_of == "marginal":
        log_p = log_p.exp().mean(dim=1, keepdim=True).log()  # (B,1,T,5)
        log_r = log_r.exp().mean(dim=1, keepdim=True).log()  # (B,1,T,5)
    kl = (log_p.exp() * (log_p - log_r)).sum(dim=-1).mean(dim=1)  # (B,T)
    per_blank = {"grpo": 16, "dapo": 16, "bnpo": 16, "dr_grpo": 4 * 8, "sum": 4}[loss_type]
    (0.3 * kl[mask].sum() / per_blank).backward()  # every input has 4 blanks
    want = torch.cat([p.grad.flatten() for p in generator.parameters()])
    torch.testing.assert_close(before - after, want, rtol=1e-4, atol=1e-6)


def test_a_group_of_one_teaches_nothing():
    """The setting is refused, see test_mistakes.py; as a tensor it is compared with itself."""
    for baseline in ("mean", "leave_one_out"):
        for scale in ("group", "batch", "none"):
            config = Config(baseline=baseline, scale_rewards=scale, credit="input")
            assert (group_advantages(torch.rand(3, 1, 1), None, config) == 0).all()


def hopeless(tokens):
    return torch.full(tokens.shape, float("-inf"))


def enthusiastic(tokens):
    return torch.full(tokens.shape, float("inf"))


def opinionated(tokens):
    return 1e30 * (tokens - 2.5)


@pytest.mark.parametrize("judge", [hopeless, enthusiastic, opinionated])
@pytest.mark.parametrize("credit", ["input", "run"])
def test_rewards_are_probabilities_whatever_the_judge_says(judge, credit):
    mask = torch.ones(4, 8, dtype=torch.bool)
    _, _, rollout, metrics = step({"credit": credit}, text(6, 8), mask, judge)
    assert (rollout.credits >= 0).all()
    assert (rollout.credits <= 1).all()
    assert 0 <= metrics["reward_judge"] <= 1


def strict(text):
    """JSON has neither NaN nor infinity."""
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "masking",
    [
        {"masking": "random", "mask_ratio": 1.0},
        {"masking": "span", "mask_ratio": 0.0},
        {"masking": "word"},
    ],
)
def test_the_whole_program_on_a_text_of_one_character(tmp_path, masking):
    """V = 2, T = 5, every character hidden, or one: nothing to learn, and every file is whole."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "meta.json").write_text('{"vocabulary": "a_"}')
    for name in ("train.bin", "val.bin"):
        (tmp_path / "text" / name).write_bytes(bytes(5))
    for name, model in (("generator", Generator), ("judge", Judge)):
        write(tmp_path / f"{name}.pt", model_file(model(TransformerConfig(2, 5, 1, 1, 16)), "a_"))
    out = tmp_path / "out"
    flags = PLAIN | {
        "dataset": tmp_path / "text",
        "generator_checkpoint": tmp_path / "generator.pt",
        "judge_checkpoint": tmp_path / "judge.pt",
        "out_dir": out,
        "block_size": 5,
        "batch_size": 1,
        "group_size": 2,
        "max_iters": 2,
        "eval_inputs": 1,
        "device": "cpu",
    }
    train_grpo.main(command_line(flags, **masking))
    lines = [strict(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["entropy"] == line["mean_kl"] == line["loss"] == 0
    table = strict((out / "evaluation.json").read_text())
    assert table["after_sample"]["exact_chars"] == 1
