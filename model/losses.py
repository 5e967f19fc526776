"""Draw masked inputs, fill them, and compute the losses of the generator and the judge.

The generator learns to fill in hidden characters (masked language modeling, 1810.04805). In some of
its inputs part of the blanks are filled in already, which is what a model that fills blank by blank
gets to see. The judge learns to tell what was there from what the generator drew.

Shapes: B inputs, T characters. A policy maps masked inputs (B,T) to a distribution over their
completions, a judge maps tokens (B,T) to log-odds (B,T). `args` are the settings of
`model/pretrain.py`.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grpo.batch import INPUTS, Batch, make_batch
from grpo.policy import at_temperature
from grpo.reward import mean_over_blanks

PRETRAINING = 2**31 + 1  # begins the seeds here, so that no run draws the same random numbers


def masked_batch(dataset, args, masking, seed, reveal=False):
    """Draw inputs and what to hide of each: -> `Batch`.

    With `reveal`, about four inputs in ten get a random part of their hidden text back.
    """
    size = args.batch_size
    rng = np.random.default_rng((*seed, 1))
    tokens, mask = dataset.batch(size, masking, (*seed, INPUTS))
    if reveal:
        whole = rng.random(size) < 0.6  # (B,) do all blanks stay hidden?
        share = rng.random(size)  # (B,) otherwise, the chance that a blank stays hidden
        hide = np.where(whole, 1.0, share)  # (B,)
        stays = rng.random(mask.shape) < hide[:, None]  # (B,T)
        mask = mask & torch.from_numpy(stays)
    batch = make_batch(tokens, mask, 1, (*seed, 2))
    return batch.map(lambda x: x.to(args.device))


def generator_loss(policy, batch: Batch) -> Tensor:  # ()
    """Compute the mean of −log q of a hidden character, in nats."""
    log_q = policy(batch.masked).log_likelihood(batch.tokens[:, None])  # (B,1,T)
    return -log_q.sum() / batch.mask.sum().clamp(min=1)


def judge_loss(judge, policy, dataset, args, temperature, seed):
    """Compute the judge's cross-entropy at telling real text from drawn: -> a scalar.

    For each input a coin decides whether the judge sees what was there or what the policy drew.
    Each character that was blank is graded on its own. The loss is least where a logit is log(p/q),
    with p the completion's probability in real text and q that under the policy (residual
    energy-based models, 2004.11714). Grading only their mean isn't enough: then one character can
    decide for all, and the judge needn't learn more than that. A drawn completion that happens to
    be the real one still counts as drawn.
    """
    batch = masked_batch(dataset, args, args.judge_masking, seed)
    with torch.no_grad():
        q = at_temperature(policy(batch.masked), temperature)
        drawn = q.sample(batch).completions[:, 0]  # (B,T)
    coins = np.random.default_rng((*seed, 3)).random((len(drawn), 1)) < 0.5  # (B,1)
    real = torch.from_numpy(coins).to(drawn.device).expand(drawn.shape)  # (B,T)
    completions = torch.where(real, batch.tokens, drawn)  # (B,T)
    logits = judge(completions).float()  # (B,T)
    losses = F.binary_cross_entropy_with_logits(logits, real.float(), reduction="none")  # (B,T)
    return mean_over_blanks(losses[:, None], batch.mask).mean()
