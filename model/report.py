"""How good the generator and the judge are, on held-out text, by what is hidden.

Letters: B inputs, T characters, V vocabulary, K values of the generator's latent, N runs of
adjacent blanks. The models are functions of tokens on the CPU.
"""

import torch
from tqdm import tqdm

from data.masking import parse_masking
from model.losses import (
    DOUBT,
    MASKING,
    fill_once,
    mixture_loss,
    run_log_likelihoods,
    swap_words,
)


def in_batches(model, tokens):
    """The model's output for all inputs, 64 at a time, under a bar."""
    bar = tqdm(tokens.split(64), desc="report", leave=False, dynamic_ncols=True)
    return torch.cat([model(part) for part in bar])


def mean_score(logits, where, lenience=0.0):
    """The judge's mean P(real) over `where`: (B,T) -> (B,). e^lenience raises its odds."""
    p = (logits + lenience).sigmoid() * where  # (B,T)
    return p.sum(dim=1) / where.sum(dim=1)


def auc(real, fake):
    """Share of the pairs in which the original scores more than the fill, a tie being half.

    Scores (B,) and (B,): every original against its own fill, which is what GRPO learns from;
    (B,1) and (B,): against every fill.
    """
    ties = (real == fake).float()
    return ((real > fake).float() + 0.5 * ties).mean().item()


def prefers_original(real_logits, other_logits, changed):
    """Share of the inputs with another word in which the judge takes the original for more real."""
    real = mean_score(real_logits, changed)  # (B,)
    other = mean_score(other_logits, changed)  # (B,)
    return (real > other)[changed.any(dim=1)].float().mean().item()


def generator_figures(logits, tokens, mask):
    """Likelihood of the hidden characters, shares of the values of z, accuracy of the best guess.

    A value's share is its posterior probability, averaged over runs of blanks; the best guess is
    the argmax of the mixture's marginal.
    """
    log_q = run_log_likelihoods(logits, tokens, mask)  # (N,K)
    shares = log_q.softmax(dim=1).mean(dim=0)  # (K,)
    by_input = logits.unflatten(0, (len(tokens), -1))  # (B,K,T,V)
    marginal = by_input.softmax(dim=-1).mean(dim=1)  # (B,T,V)
    right = marginal.argmax(dim=-1) == tokens  # (B,T)
    return {
        "nats": mixture_loss(log_q, mask).item(),
        "least_z": shares.min().item(),
        "largest_z": shares.max().item(),
        "characters": right[mask].float().mean().item(),
        "whole_inputs": (right | ~mask).all(dim=1).float().mean().item(),
    }


def judge_figures(real, fake, mask):
    """How well the judge tells originals from fills, from its logits of both: (B,T) twice."""
    everywhere = torch.ones_like(mask)  # (B,T)
    figures = {}
    for name, where, lenience in (
        ("judge_auc", everywhere, 0.0),
        ("judge_auc_at_blanks", mask, 0.0),
        ("judge_auc_lenient", everywhere, 2 * DOUBT),
    ):
        of_real = mean_score(real, where, lenience)[:, None]  # (B,1)
        figures[name] = auc(of_real, mean_score(fake, where, lenience))
    figures["judge_auc_paired"] = auc(mean_score(real, everywhere), mean_score(fake, everywhere))
    return figures


TESTS = [  # name, masking, ratio, hidden words
    ("random 15%", "random", 0.15, 0),
    ("random 30%", "random", 0.30, 0),
    ("random and short runs 15%", "random:0.5,sticky:0.5", 0.15, 0),
    ("one word", "word", 0, 1),
    ("two words", "word", 0, 2),
    ("random and short runs 30%", "random:0.5,sticky:0.5", 0.30, 0),
]


@torch.no_grad()
def report(generator, judge, dataset, words, block_size, size=1024):
    """Print, on held-out text and by masking, how good the two models are.

    The judge's figures are against the generator's draws at temperature 1.
    """

    def show(name, figures):
        cells = [f"  {key} {value:.3f}" for key, value in figures.items()]
        print(f"{name:26s}" + "".join(cells), flush=True)

    for i, (name, masking, ratio, hidden) in enumerate(TESTS):
        masking = parse_masking(masking)
        tokens, mask = dataset.batch(size, block_size, masking, ratio, hidden, (7, i))  # (B,T)
        masked = tokens.masked_fill(mask, dataset.mask_id)  # (B,T)
        logits = in_batches(generator, masked)  # (B·K,T,V)
        figures = generator_figures(logits, tokens, mask)
        z = torch.arange(size) % (len(logits) // size)  # (B,)
        rng = torch.Generator().manual_seed(i)
        uniforms = torch.rand(size, 1, block_size, generator=rng)  # (B,1,T)
        fills = fill_once(logits, masked, mask, uniforms, z)  # (B,T)
        real = in_batches(judge, tokens)  # (B,T)
        fake = in_batches(judge, fills)  # (B,T)
        show(name, figures | judge_figures(real, fake, mask))
    tokens, _ = dataset.batch(size, block_size, parse_masking(MASKING), 0.0, 1, (7, 4))  # (B,T)
    others = swap_words(dataset, words, tokens, (7, 9), share=0.1)  # (B,T)
    real = in_batches(judge, tokens)  # (B,T)
    fake = in_batches(judge, others)  # (B,T)
    share = prefers_original(real, fake, others != tokens)
    show("another word in its place", {"judge_prefers_original": share})
