"""Put gradient estimators under a microscope: how biased, how noisy, and where do they point?

    python -m grpo.experiments.gradient baseline
    python -m grpo.experiments.gradient stale --steps=16,20 --repeat=100
    python -m grpo.experiments.gradient shape --pool=1024

GRPO estimates a gradient from draws. On sums every correct answer y to an input can be listed, so
with p = Σ_y q(y) we know the true one, ∇ mean p. This trains config/rule.py, pauses before some of
its steps, and estimates the gradient there again and again, each time from new draws. That takes
one to seven minutes a question. A row is an estimator, named by its flags:

    shape     512 draws: many inputs and a few draws of each, or the other way around
    baseline  what's subtracted from a reward; `failures` are rewards of 0 and -1
    scale     what an advantage is divided by
    stale     the policy of --age steps ago drew (or the base model, if there were fewer), and the
              rows differ in what they do with the ratio
    second    the second update of a step: the policy has just learned from the very same draws

The inputs are always the whole pool, so only the draws make noise. With --inputs they're drawn from
the pool, too. For an estimate g, in units of the truth's length:

    size      how far E g gets in the direction of the truth; 1 is right
    bias      ‖E g − truth‖, corrected for the noise in the mean
    at most   the upper end of its 95% interval
    var       the variance, E ‖g − E g‖²
    cos       the cosine between one estimate and the truth
    cos E     the cosine between E g and the truth, corrected like the bias

Shapes: B inputs, T characters, G completions, n answers to an input, P weights, R estimates.
"""

from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from data.rules import SumRule
from data.user_mistake import Mistake, run_program
from grpo.advantage import compute_advantages
from grpo.batch import draw_batch, make_batch
from grpo.experiments.fair import whole_numbers
from grpo.experiments.supervised import NOTHING, correct
from grpo.loss import grpo_loss, loss_weights
from grpo.optimizer import Optimizer, learning_rate, make_adamw
from grpo.run.arguments import read_arguments, within
from grpo.run.config import Config
from grpo.run.load import Models, load_models, load_rewards, load_splits
from train_grpo import grpo_step

CPU = torch.device("cpu")
RUN = "config/rule.py"
PLAIN = f"{RUN} --baseline=leave_one_out --scale_rewards=none --loss_type=sum --kl_beta=0"
NO_RATIO, NO_CLIP = "--objective=reinforce", "--clip_eps=1 --clip_eps_high=1e9"
PRODUCT = f"{NO_RATIO} --product"
RATIOS = NO_RATIO, NO_CLIP, "--clip_eps=0.2", "--objective=gspo", "--objective=cispo", PRODUCT
SUCCESSES = "--baseline=none --scale_rewards=none"
FAILURES = f"{SUCCESSES} --reward=grpo/experiments/rewards.py:failures"
QUESTIONS = {
    "shape": [f"--inputs={B} --group_size={512 // B}" for B in (256, 128, 32)],
    "baseline": ["--baseline=leave_one_out", "--baseline=mean", SUCCESSES, FAILURES],
    "scale": [f"--scale_rewards={x}" for x in ("none", "group", "batch")],
    "stale": [f"--age={age} {ratio}" for age in (1, 4, 16) for ratio in RATIOS],
    "second": [f"--update {ratio}" for ratio in RATIOS]
    + [f"--update {ratio} {own}" for own in (SUCCESSES, FAILURES) for ratio in RATIOS[1:3]],
}


@dataclass
class Settings(Config):
    product: bool = False  # multiply them by the ratio of the whole completion
    inputs: int = within(0, 0)  # how many are drawn from the pool; 0: all of it
    age: int = within(0, 0)  # of the policy that fills them, in steps
    update: bool = False  # learn from the same draws first, as config/rule.py does


@dataclass
class Microscope:
    steps: str = "0,20,40"
    pool: int = 128  # how many inputs
    repeat: int = 40  # how many estimates


def read(*flags: str) -> Settings:
    given, _ = read_arguments(Settings, " ".join(flags).split())
    return Settings(**given)


def rewards_of(config):
    return load_rewards(config, Models(None, None, None, None, None), SumRule(), CPU)


def train(steps: int, size: int) -> tuple:
    """Train: -> (policy, optimizer) before each step, the reference, and a pool of inputs."""
    config = read(RUN)
    data, _ = load_splits(config)
    policy, reference, *_ = load_models(config, CPU)
    optimizer = Optimizer(make_adamw(policy.network, config), config.grad_clip)
    copies = []
    for step in range(steps + 1):
        optimizer.set_learning_rate(learning_rate(step, config))
        copies.append(deepcopy((policy, optimizer)))
        batch = draw_batch(data, config, step, CPU)
        grpo_step(policy, reference, rewards_of(config), optimizer, batch, config)
    pool = draw_batch(data, replace(config, batch_size=size), config.max_iters, CPU)
    return copies, reference, pool


def gradient(value: Tensor, policy) -> Tensor:  # () -> (P,)
    weights = [*policy.network.parameters()]
    return parameters_to_vector(torch.autograd.grad(value, weights))  # (P,)


def exact(policy, inputs) -> Tensor:
    """Compute ∇ mean p: -> (P,)."""
    answers, exists = correct(inputs)  # (B,n,T), (B,n)
    log_q = policy(inputs.masked).log_likelihood(answers).double().sum(dim=-1)  # (B,n)
    p = log_q.where(exists, NOTHING).exp().sum(dim=1)  # (B,)
    return gradient(p.mean(), policy)


def estimate(policy, drawer, batch, config) -> Tensor:
    """Estimate ∇ mean p of a policy from what another one (or the same) draws: -> (P,)."""
    with torch.no_grad():
        q_old = drawer(batch.masked)
        sample = q_old.sample(batch)
        old = q_old.log_probs(sample, q_old)
    now = policy(batch.masked).log_probs(sample, q_old)
    reward, _ = rewards_of(config)(sample.completions, batch)  # (B,G)
    A = compute_advantages(reward, config)  # (B,G)
    if config.product:  # only this ratio turns old draws into new ones, on average
        A = A * (now.logp - old.logp).sum(dim=-1).exp().detach()  # (B,G)
    weights = loss_weights(batch.mask, config)  # (B,T)
    loss, _ = grpo_loss(now, old, A, batch.mask, batch.mask, weights, config)
    return gradient(-loss, policy)


def repeat(flags: str, step: int, times: int, copies, reference, pool) -> list[Tensor]:
    """Estimate again and again: -> estimates, and the exact gradients: (R,P) each."""
    config, learner = read(PLAIN, flags), read(RUN, flags, "--num_iterations=1")
    policy, _ = copies[step]
    drawer, _ = copies[max(0, step - config.age)]
    truth = exact(policy, pool)
    rows = np.arange(len(pool.mask))  # (B,)
    found = []
    for r in range(times):
        if config.inputs:
            rows = np.random.default_rng(r).integers(len(pool.mask), size=config.inputs)  # (B,)
        batch = make_batch(pool.tokens[rows], pool.mask[rows], config.group_size, (r,))
        if config.update:
            policy, optimizer = deepcopy(copies[step])
            grpo_step(policy, reference, rewards_of(config), optimizer, batch, learner)
            truth = exact(policy, pool)
        found.append((estimate(policy, drawer, batch, config), truth))
    return [torch.stack(each) for each in zip(*found)]  # (R,P) each


def products(x: Tensor, y: Tensor) -> Tensor:
    """Multiply each x by the mean of the other y, whose noise is their own: (R,P) -> (R,)."""
    every = x @ y.T  # (R,R)
    return (every.sum(dim=1) - every.diagonal()) / (len(x) - 1)  # (R,)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Compute the cosine between E x and E y: (R,P) -> ()."""
    return products(x, y).mean() / (products(x, x).mean() * products(y, y).mean()).sqrt()


def describe(g: Tensor, truth: Tensor) -> dict[str, float]:
    """Compute the columns of the table: (R,P), (R,P) -> {name: number}."""
    unit = products(truth, truth).mean()  # ()
    error = g - truth  # (R,P)
    squares = products(error, error) / unit  # (R,) whose mean is the squared bias
    bias = squares.mean()  # ()
    margin = 4 * squares.std() / len(g) ** 0.5  # () two standard errors
    columns = {
        "size": products(g, truth).mean() / unit,
        "bias": bias.clamp(min=0).sqrt(),
        "at most": (bias + margin).clamp(min=0).sqrt(),
        "var": error.square().sum(dim=1).mean() / unit - bias,
        "cos": F.cosine_similarity(g, truth).mean(),
        "cos E": cosine(g, truth),
    }
    return {name: x.item() for name, x in columns.items()}


def main(arguments: list[str]) -> None:
    given, words = read_arguments(Microscope, arguments, __doc__)
    if len(words) != 1 or words[0] not in QUESTIONS:
        raise Mistake(f"name one question: {', '.join(QUESTIONS)}")
    args = Microscope(**given)
    steps = whole_numbers(args.steps)
    trained = train(max(steps), args.pool)
    for step in steps:
        print(f"\nstep {step:<3}   size    bias at most     var     cos   cos E")
        for flags in QUESTIONS[words[0]]:
            row = describe(*repeat(flags, step, args.repeat, *trained))
            print("     ", *(f"{x:7.3g}" for x in row.values()), "", flags, flush=True)


if __name__ == "__main__":
    run_program(main)
