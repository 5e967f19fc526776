"""Inputs and rewards at the edge of what there can be: what comes out is finite and right, whatever the settings."""

import json

import pytest
import torch

import train_grpo
from grpo.advantage import advantages
from grpo.plumbing.checkpoint import model_file, write
from grpo.plumbing.config import Config
from grpo.plumbing.log import Clock
from grpo.plumbing.setup import forward
from grpo.reward import Rewards
from grpo.stats import log_softmax
from grpo.step import draw_uniforms, grpo_step
from model.transformer import Generator, Judge, TransformerConfig
from tests.conftest import command_line

SETTINGS = [
    {"loss_type": loss_type, **more}
    for loss_type in ("grpo", "dapo", "bnpo", "dr_grpo", "sum")
    for more in (
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
]
JUDGES = {
    "a judge": lambda tokens: torch.sin(3.0 * tokens) * 5,
    "one that likes all the same": lambda tokens: torch.ones_like(tokens, dtype=torch.float32),
}


def models(V, T):
    torch.manual_seed(0)
    return [Generator(TransformerConfig(V, T, 1, 1, 16)) for _ in range(2)]


def step(settings, tokens, mask, judge=JUDGES["a judge"], V=6, G=4):
    """-> the policy's weights before and after a step of plain gradient descent with rate 1, the rollout, the metrics."""
    generator, reference = models(V, tokens.shape[1])
    config = Config(
        **{
            "batch_size": len(tokens),
            "group_size": G,
            "learning_rate": 1.0,
            "grad_clip": 0.0,
            "temperature": 0.7,
        }
        | settings
    )
    optimizer = torch.optim.SGD(generator.parameters(), lr=1.0)
    before = torch.cat([p.detach().flatten().clone() for p in generator.parameters()])
    rollout, metrics = grpo_step(
        *(forward(model, torch.device("cpu"), config) for model in (generator, reference)),
        Rewards(judge),
        optimizer,
        tokens,
        mask,
        V - 1,
        draw_uniforms(len(tokens), G, tokens.shape[1], (1,)),
        config,
        Clock(torch.device("cpu")),
    )
    after = torch.cat([p.detach().flatten() for p in generator.parameters()])
    assert after.isfinite().all() and all(value.isfinite() for value in metrics.values()), metrics
    assert torch.equal(
        rollout.completions == V - 1, torch.zeros_like(rollout.completions, dtype=torch.bool)
    )  # every blank is filled
    return before, after, rollout, metrics


def text(V, T, rows=4):
    return torch.randint(V - 1, (rows, T), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_blank_no_gradient(settings):
    before, after, _, metrics = step(settings, text(6, 8), torch.zeros(4, 8, dtype=torch.bool))
    assert (
        torch.equal(before, after)
        and metrics["loss"] == metrics["mean_kl"] == metrics["entropy"] == 0
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_all_blanks_one_blank_and_one_character(settings):
    for tokens, mask in (
        (text(6, 8), torch.ones(4, 8, dtype=torch.bool)),
        (text(6, 8), torch.arange(8).expand(4, 8) == 3),
        (text(6, 1), torch.ones(4, 1, dtype=torch.bool)),
    ):
        before, after, rollout, metrics = step(settings, tokens, mask)
        assert not torch.equal(before, after) and metrics["mean_kl"] > 0
        assert (
            (rollout.completions == tokens[:, None]) | mask[:, None]
        ).all()  # what was given stays


@pytest.mark.parametrize(
    "loss_type, share",
    [("grpo", 0.5), ("dapo", 1.0), ("bnpo", 1.0), ("dr_grpo", 0.5), ("sum", 0.5)],
)
def test_an_input_without_blanks_teaches_nothing(loss_type, share):
    """It counts among the inputs, and not among the blanks."""
    tokens, mask = text(6, 8), torch.rand(4, 8, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[:2, 0], mask[2:] = True, False
    start, alone, *_ = step({"loss_type": loss_type}, tokens[:2], mask[:2])
    _, both, *_ = step({"loss_type": loss_type}, tokens, mask)
    torch.testing.assert_close(both - start, share * (alone - start), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_two_characters_of_which_one_is_the_blank(settings):
    """There is but one fill: it is certain, so nothing is learned."""
    before, after, rollout, metrics = step(
        settings, text(2, 8), torch.arange(8).expand(4, 8) % 3 == 0, V=2
    )
    assert (
        torch.equal(before, after)
        and (rollout.completions == 0).all()
        and metrics["mean_log_prob"] == metrics["entropy"] == metrics["mean_kl"] == 0
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equal_rewards_leave_the_kl_alone(settings):
    """Advantages exactly 0; what remains is the gradient of the penalty, as autograd finds it from its definition; without a penalty nothing moves at all."""
    tokens, mask, same = (
        text(6, 8),
        torch.arange(8).expand(4, 8) % 2 == 0,
        JUDGES["one that likes all the same"],
    )
    before, after, rollout, metrics = step(
        settings | {"kl_beta": 0.0, "entropy_coef": 0.0}, tokens, mask, same
    )
    assert (
        torch.equal(before, after)
        and (rollout.advantages == 0).all()
        and metrics["pg_loss"] == 0
        and metrics["frac_reward_zero_std"] == 1
    )
    if settings.keys() == {"loss_type"}:
        before, after, *_ = step(settings | {"kl_beta": 0.3}, tokens, mask, same)
        generator, reference = models(6, 8)
        log_p, log_r = (
            log_softmax(model(tokens.masked_fill(mask, 5)), 0.7)[..., :5]
            for model in (generator, reference)
        )
        kl = (log_p.exp() * (log_p - log_r)).sum(dim=-1)[mask].sum()
        per_blank = {"grpo": 16, "dapo": 16, "bnpo": 16, "dr_grpo": 4 * 8, "sum": 4}[
            settings["loss_type"]
        ]  # every input has 4 blanks
        (0.3 * kl / per_blank).backward()
        torch.testing.assert_close(
            before - after,
            torch.cat([p.grad.flatten() for p in generator.parameters()]),
            rtol=1e-4,
            atol=1e-6,
        )


def test_a_group_of_one_teaches_nothing():
    """The setting is refused, see test_mistakes.py; as a tensor it is compared with itself."""
    for baseline in ("mean", "leave_one_out"):
        for scale in ("group", "batch", "none"):
            assert (advantages(torch.rand(3, 1), baseline, scale) == 0).all()


def test_rewards_are_probabilities_whatever_the_judge_says():
    tokens, mask = text(6, 8), torch.ones(4, 8, dtype=torch.bool)
    for judge in (
        lambda tokens: 1e30 * (tokens - 2.5),
        lambda tokens: torch.full(tokens.shape, float("inf")),
        lambda tokens: torch.full(tokens.shape, float("-inf")),
    ):
        _, _, rollout, _ = step({}, tokens, mask, judge)
        assert (rollout.parts >= 0).all() and (rollout.parts <= 1).all()


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
    train_grpo.main(
        command_line(
            {
                "dataset": tmp_path / "text",
                "generator_checkpoint": tmp_path / "generator.pt",
                "judge_checkpoint": tmp_path / "judge.pt",
                "out_dir": tmp_path / "out",
                "block_size": 5,
                "batch_size": 1,
                "group_size": 2,
                "max_iters": 2,
                "eval_inputs": 1,
                "device": "cpu",
            },
            **masking,
        )
    )
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 2 and all(
        line["entropy"] == line["mean_kl"] == line["loss"] == 0 for line in lines
    )
    assert (
        json.loads((tmp_path / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail)[
            "after_sample"
        ]["exact_chars"]
        == 1
    )
