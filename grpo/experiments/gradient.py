"""Put gradient estimators under a microscope: how long, how noisy, and where do they point?

    python -m grpo.experiments.gradient baseline
    python -m grpo.experiments.gradient second

GRPO estimates a gradient from draws. On sums every correct answer y to an input can be listed, so
with p = Σ_y q(y) we know the true one, ∇ mean p. This trains config/rule.py, pauses before some of
its steps, and estimates the gradient there again and again for the same inputs, each time from new
draws. That takes some minutes a question. A row is an estimator, named by its flags:

    baseline  what's subtracted from a reward; `failures` are rewards of 0 and -1
    scale     what an advantage is divided by
    second    the second update of a step: the policy has just learned from the very same draws

For an estimate g, in units of the truth's length:

    size      how far E g gets in the direction of the truth; 1 is right
    var       the variance of g − truth
    cos       the cosine between E g and the truth, and no cosine at all (over 1) if noise drowns it

Shapes: B inputs, T characters, G completions, n answers to an input, P weights, R estimates.
"""

from copy import deepcopy

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from data.rules import SumRule
from data.user_mistake import Mistake, run_program
from grpo.advantage import compute_advantages
from grpo.batch import draw_batch, make_batch
from grpo.experiments.supervised import NOTHING, correct
from grpo.loss import grpo_loss, loss_weights
from grpo.optimizer import Optimizer, learning_rate, make_adamw
from grpo.run.config import load_config
from grpo.run.load import Models, load_models, load_rewards, load_splits
from train_grpo import grpo_step

CPU = torch.device("cpu")
RUN = "config/rule.py"
PLAIN = f"{RUN} --baseline=leave_one_out --scale_rewards=none --loss_type=sum --kl_beta=0"
SUCCESSES = "--baseline=none --scale_rewards=none"
FAILURES = f"{SUCCESSES} --reward=grpo/experiments/rewards.py:failures"
QUESTIONS = {
    "baseline": ["--baseline=leave_one_out", "--baseline=mean", SUCCESSES, FAILURES],
    "scale": [f"--scale_rewards={x}" for x in ("none", "group", "batch")],
    "second": ["--clip_eps=1 --clip_eps_high=1e9", "--clip_eps=0.2"],
}
STEPS = 0, 20, 40
REPEAT = 40


def rewards_of(config):
    return load_rewards(config, Models(None, None, None, None, None), SumRule(), CPU)


def gradient(value: Tensor, policy) -> Tensor:  # () -> (P,)
    weights = [*policy.network.parameters()]
    return parameters_to_vector(torch.autograd.grad(value, weights))  # (P,)


def exact(policy, inputs) -> Tensor:
    """Compute ∇ mean p: -> (P,)."""
    answers, exists = correct(inputs)  # (B,n,T), (B,n)
    log_q = policy(inputs.masked).log_likelihood(answers).double().sum(dim=-1)  # (B,n)
    p = log_q.where(exists, NOTHING).exp().sum(dim=1)  # (B,)
    return gradient(p.mean(), policy)


def repeat(flags: str, second: bool, policy, reference, optimizer, pool, times: int = REPEAT):
    """Estimate ∇ mean p again and again: -> estimates, and the exact gradients: (R,P) each.

    With `second`, the policy first takes an update of config/rule.py from the same draws.
    """
    config = load_config(f"{PLAIN} {flags}".split())
    update = load_config(f"{RUN} {flags} --num_iterations=1".split())
    rewards = rewards_of(config)
    found, truth = [], []
    for r in range(times):
        batch = make_batch(pool.tokens, pool.mask, config.group_size, (r,))
        with torch.no_grad():
            q_old = policy(batch.masked)
            sample = q_old.sample(batch)
            old = q_old.log_probs(sample, q_old)
        learner, its_optimizer = deepcopy((policy, optimizer))
        if second:
            grpo_step(learner, reference, rewards, its_optimizer, batch, update)
        now = learner(batch.masked).log_probs(sample, q_old)
        reward, _ = rewards(sample.completions, batch)  # (B,G)
        A = compute_advantages(reward, config)  # (B,G)
        weights = loss_weights(batch.mask, config)  # (B,T)
        loss, _ = grpo_loss(now, old, A, batch.mask, batch.mask, weights, config)
        found.append(gradient(-loss, learner))
        truth.append(exact(learner, pool))
    return torch.stack(found), torch.stack(truth)


def product(x: Tensor, y: Tensor) -> Tensor:
    """Estimate E x · E y by pairs of different rows, whose noise is their own: (R,P) -> ()."""
    every = x @ y.T  # (R,R)
    return (every.sum() - every.trace()) / (len(x) * (len(x) - 1))


def describe(g: Tensor, truth: Tensor) -> dict[str, float]:
    """Compute the columns of the table: (R,P), (R,P) -> {name: number}."""
    unit = product(truth, truth)
    along = product(g, truth)
    columns = {
        "size": along / unit,
        "var": (g - truth).var(dim=0).sum() / unit,
        "cos": along / (product(g, g) * unit).sqrt(),
    }
    return {name: x.item() for name, x in columns.items()}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in QUESTIONS:
        raise Mistake(f"name one question: {', '.join(QUESTIONS)}")
    [question] = arguments
    config = load_config([RUN])
    train, _ = load_splits(config)
    policy, reference, *_ = load_models(config, CPU)
    optimizer = Optimizer(make_adamw(policy.network, config), config.grad_clip)
    pool = draw_batch(train, config, config.max_iters, CPU)
    for step in range(STEPS[-1] + 1):
        optimizer.set_learning_rate(learning_rate(step, config))
        if step in STEPS:
            print("\nstep", step)
            for flags in QUESTIONS[question]:
                second = question == "second"
                row = describe(*repeat(flags, second, policy, reference, optimizer, pool))
                print(*(f"{name} {x:7.3g}" for name, x in row.items()), "", flags, flush=True)
        batch = draw_batch(train, config, step, CPU)
        grpo_step(policy, reference, rewards_of(config), optimizer, batch, config)


if __name__ == "__main__":
    run_program(main, __doc__)
