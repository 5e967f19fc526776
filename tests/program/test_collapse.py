"""Check that what ships isn't fooled: by a short run on sums, and by what was measured on text."""

import pytest
import torch

from data.rules import check
from data.vocabulary import decode
from grpo.batch import draw_batch
from grpo.optimizer import Optimizer, learning_rate, make_adamw
from grpo.reward import judge_scores
from grpo.run.config import load_config
from grpo.run.load import load_data, load_models, load_rewards
from train_grpo import grpo_step

CPU = torch.device("cpu")
SHORT = "--max_iters=40 --batch_size=32 --learning_rate=2e-3 --num_iterations=1 --eval_inputs=300"


@pytest.mark.parametrize("config, fooled", [("grpo_config", False), ("fooled", True)])
def test_after_a_short_run_on_sums_only_the_weak_judge_is_fooled(config, fooled):
    settings = load_config([f"config/{config}.py", *SHORT.split()])
    models = load_models(settings, CPU)
    train, held_out = load_data(settings, CPU)
    rewards = load_rewards(settings, models.judge, models.base, held_out.rule, CPU)
    optimizer = Optimizer(make_adamw(models.policy.network, settings), settings.grad_clip)
    for step in range(settings.max_iters):
        optimizer.set_learning_rate(learning_rate(step, settings))
        batch = draw_batch(train, settings, step, CPU)
        grpo_step(models.policy, models.reference, rewards, optimizer, batch, settings)
    with torch.no_grad():
        completions = models.policy(held_out.batch).sample().completions[:, :4]  # (300,4,11)
        accepted = judge_scores(models.judge, completions, held_out.batch) > 0
    wrong = ~check(held_out.rule, completions, held_out.batch.masked)
    assert (accepted[wrong].float().mean() > 0.1) == fooled
    first_numbers = {text[:3] for text in decode(completions.flatten(0, 1))}
    assert len(first_numbers) > 100
