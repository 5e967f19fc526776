"""How good the generator and the judge are, on held-out text, by what is hidden.

Letters: B inputs, T characters. The models are functions of tokens on the CPU.
"""

import torch

from data.masking import parse_masking
from grpo.mixture import likeliest, log_prob
from grpo.reward import begins_run, log_odds
from grpo.rollout import in_batches
from model.losses import draw_fills

TESTS = [  # masking, ratio, hidden words
    ("random", 0.15, 0),
    ("word", 0, 1),
    ("word", 0, 2),
    ("short", 0, 3),
]


def auc(real, fake):
    """Share of all pairs of an original and a fill in which the original scores more.

    (n,) and (m,); a tie is half a pair.
    """
    fake = fake.sort().values  # (m,)
    below = torch.searchsorted(fake, real)  # (n,) how many fills score less
    up_to = torch.searchsorted(fake, real, right=True)  # (n,) or the same
    return (below + up_to).float().mean().item() / (2 * len(fake))


@torch.no_grad()
def report(generator, judge, dataset, args, size=1024):
    """Print nats a hidden character, the share restored by the best guess, and the judge's AUC.

    The last of the runs of blanks, all of them text against all of them drawn.
    """
    for i, (masking, ratio, hidden) in enumerate(TESTS):
        parts = parse_masking(masking)
        tokens, mask = dataset.batch(size, args.block_size, parts, ratio, hidden, (7, i))
        masked = tokens.masked_fill(mask, dataset.mask_id)  # (B,T)
        logits = in_batches(generator, masked, 64)  # (B,T,V) or (B,T,K,V)
        nats = -log_prob(logits, tokens[:, None], mask).sum() / mask.sum()
        restored = (likeliest(logits, masked, mask) == tokens)[mask].float().mean()
        drawn = draw_fills(generator, dataset, tokens, mask, 1.0, (8, i))  # (B,T)
        both = torch.stack([tokens, drawn], dim=1)  # (B,2,T)
        of_runs = log_odds(judge, both, mask).mT[begins_run(mask)]  # (runs,2)
        share = auc(*of_runs.T.contiguous())
        figures = f"nats {nats:.3f}  characters {restored:.3f}  auc {share:.3f}"
        print(f"{masking} {hidden or ratio}: {figures}", flush=True)
