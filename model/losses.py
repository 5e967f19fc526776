"""What the two models of GRPO learn from: inputs with blanks, fills of them, and the losses.

The generator learns masked characters (1810.04805), partly revealed inputs included, since filling
blank by blank passes through those. The judge learns to tell text from the generator's own draws.

Letters: B inputs, T characters. The models are functions of tokens on the CPU; `args` are the
settings of `model/pretrain.py`.
"""

import numpy as np
import torch
import torch.nn.functional as F

from data.masking import parse_masking
from grpo.mixture import log_prob
from grpo.plumbing.config import Config
from grpo.policy import sample
from grpo.reward import begins_run, mean_over_blanks, mean_over_run
from grpo.rollout import to_fill


def masked_batch(dataset, args, masking, seed):
    """Inputs at every difficulty: tokens (B,T), mask (B,T).

    In four rows of ten, part of the blanks is revealed again.
    """
    size = args.batch_size
    rng = np.random.default_rng((*seed, 1))
    ratio = rng.uniform(0.1, 0.6, size)  # (B,)
    words = rng.integers(1, 6, size)  # (B,)
    masking = parse_masking(masking)
    shape = (size, args.block_size)
    tokens, mask = dataset.batch(*shape, masking, ratio, words, (*seed, 0))  # (B,T) twice
    whole = rng.random(size) < 0.6  # (B,) does all stay hidden?
    share = rng.random(size)  # (B,) else this much
    hide = np.where(whole, 1.0, share)  # (B,)
    stays = rng.random(mask.shape) < hide[:, None]  # (B,T)
    return tokens, mask & torch.from_numpy(stays)


def generator_loss(generator, dataset, args, seed):
    """−log q(text) per hidden character, in nats: with a latent, −log Σ_z π(z) Π_t q_z,t a run."""
    tokens, mask = masked_batch(dataset, args, args.masking, seed)  # (B,T) twice
    logits = generator(tokens.masked_fill(mask, dataset.mask_id))  # (B,T,V) or (B,T,K,V)
    return -log_prob(logits, tokens[:, None], mask).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def draw_fills(generator, dataset, tokens, mask, temperature, seed):
    """One draw for each input, at this temperature of z and letters: (B,T) -> (B,T)."""
    inputs = to_fill(tokens, mask, dataset.mask_id, 1, seed)
    logits = generator(inputs.masked)  # (B,T,V) or (B,T,K,V)
    fills = sample(logits, inputs, Config(temperature=temperature))
    return fills.completions[:, 0]


def judge_loss(judge, generator, dataset, args, temperature, seed):
    """Binary cross-entropy of "text, or drawn?", of each run of blanks by the mean of its logits.

    Half of the runs of an input are text, half are the generator's draws, each by its own coin. So
    its best logit is log p/q, p the text's distribution and q the generator's: labels are by
    source, a draw that happens to equal the text stays a draw. ("A reward model as a residual
    energy": 2004.11714.) That of draws at temperature 1; hotter ones are plainly wrong, to begin.
    """
    tokens, mask = masked_batch(dataset, args, args.judge_masking, seed)  # (B,T) twice
    drawn = draw_fills(generator, dataset, tokens, mask, temperature, (*seed, 2))  # (B,T)
    coins = np.random.default_rng((*seed, 3)).random(mask.shape) < 0.5
    coins = torch.from_numpy(coins)  # (B,T)
    run = begins_run(mask).cumsum(dim=1)  # (B,T) its number in the input
    real = coins.gather(1, run.clamp(max=coins.shape[1] - 1))  # (B,T) bool, the same in a run
    completions = torch.where(mask & ~real, drawn, tokens)  # (B,T)
    logits = judge(completions).float()  # (B,T)
    logits = mean_over_run(logits[:, None], mask)[:, 0]  # (B,T)
    losses = F.binary_cross_entropy_with_logits(logits, real.float(), reduction="none")  # (B,T)
    of_inputs = mean_over_blanks(losses[:, None], mask)  # (B,1)
    return of_inputs.sum() / mask.any(dim=1).sum().clamp(min=1)
