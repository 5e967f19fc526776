"""How good the generator and the judge are, on held-out text, by what is hidden.

Letters: B inputs, T characters, V vocabulary. The models are functions of tokens on the CPU.
"""

import torch
import torch.nn.functional as F

from data.masking import parse_masking
from grpo.reward import judge_scores
from grpo.rollout import draw_uniforms, in_batches
from grpo.sampling import sample_completions
from model.losses import swap_words

TESTS = [  # masking, ratio, hidden words
    ("random", 0.15, 0),
    ("random", 0.30, 0),
    ("word", 0, 1),
    ("word", 0, 2),
]


def mean_scores(judge, tokens, others, where):
    """The judge's mean P(real) over `where` of two texts: (B,T) three times -> (B,) twice."""
    both = torch.stack([tokens, others], dim=1)  # (B,2,T)
    scores = judge_scores(judge, both) * where[:, None]  # (B,2,T)
    means = scores.sum(dim=2) / where.sum(dim=1, keepdim=True)  # (B,2)
    return means.unbind(dim=1)


def auc(real, fake):
    """Share of all pairs of an original and a fill in which the original scores more.

    (B,) and (B,); a tie is half a pair.
    """
    real = real[:, None]  # (B,1)
    wins = (real > fake).float() + 0.5 * (real == fake)  # (B,B)
    return wins.mean().item()


@torch.no_grad()
def report(generator, judge, dataset, words, block_size, size=1024):
    """Print nats, share of restored characters and the judge's AUC at the blanks, by masking.

    The judge's figures are against the generator's draws at temperature 1. Last, where a word in
    ten is another one of its length: how often the judge takes the original for more real.
    """
    for i, (masking, ratio, hidden) in enumerate(TESTS):
        parts = parse_masking(masking)
        tokens, mask = dataset.batch(size, block_size, parts, ratio, hidden, (7, i))  # (B,T) twice
        masked = tokens.masked_fill(mask, dataset.mask_id)  # (B,T)
        logits = in_batches(generator, masked, 64).float()  # (B,T,V)
        nats = F.cross_entropy(logits[mask], tokens[mask])
        right = logits.argmax(dim=-1)[mask] == tokens[mask]  # (blanks,)
        uniforms = draw_uniforms(size, 1, block_size, (8, i))  # (B,1,T)
        fills, _ = sample_completions(logits, masked, mask, uniforms)  # (B,1,T)
        real, fake = mean_scores(judge, tokens, fills[:, 0], mask)  # (B,) twice
        restored = right.float().mean()
        figures = f"nats {nats:.3f}  characters {restored:.3f}  auc {auc(real, fake):.3f}"
        print(f"{masking} {hidden or ratio}: {figures}", flush=True)

    tokens, _ = dataset.batch(size, block_size, {"random": 1.0}, 0, 0, (7, 4))  # (B,T)
    others = swap_words(dataset, words, tokens, (7, 9), share=0.1)  # (B,T)
    changed = others != tokens  # (B,T)
    real, other = mean_scores(judge, tokens, others, changed)  # (B,) twice
    prefers = (real > other)[changed.any(dim=1)]  # (inputs with another word,)
    share = prefers.float().mean()
    print(f"another word in its place: prefers the original {share:.3f}")
