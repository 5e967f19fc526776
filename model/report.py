"""Measure the generator and the judge on held-out inputs, which hide what GRPO will hide.

Shapes: N inputs, T characters.
"""

import torch
import torch.nn.functional as F

from data.rules import check
from grpo.batch import make_batch
from grpo.reward import judge_logits, mean_over_blanks

REPORT = 2**31 + 2  # begins the seeds here, so that no training draws the same random numbers


def auc(real, drawn):
    """Compute in which share of all N · N pairs the real text scores more: (N,), (N,) -> ().

    A tie counts half.
    """
    more = (real[:, None] > drawn).float()  # (N,N)
    ties = (real[:, None] == drawn).float()  # (N,N)
    return (more + ties / 2).mean()


@torch.no_grad()
def report(policy, judge, dataset, rule, masking, device, size=3072):
    """Print how well the policy fills blanks, and the judge tells completions from text.

    The policy gets its mean −log q of a hidden character, in nats. The judge gets its loss and its
    AUC (0.5 is chance). Its dissent says how often one of its characters votes against real text
    that the mean accepts. If a rule knows which completions are correct, we also print how many of
    those the judge accepts, and how many of the others.
    """
    batch = make_batch(*dataset.batch(size, masking, (REPORT, 0)), 1, (REPORT, 0))
    batch = batch.map(lambda x: x.to(device))
    tokens, mask = batch.tokens, batch.mask  # each (N,T)
    log_q = policy(batch.masked).log_likelihood(tokens[:, None])  # (N,1,T)
    print(f"held-out inputs with masking={masking}: nats {-log_q.sum() / mask.sum():.3f}")
    if judge:
        completions = policy(batch.masked).sample(batch).completions[:, 0]  # (N,T)
        both = torch.stack([tokens, completions], dim=1)  # (N,2,T)
        logits = judge_logits(judge, both)  # (N,2,T)
        scores = mean_over_blanks(logits, mask)  # (N,2)
        real, drawn = scores.T.contiguous()  # each (N,)
        labels = torch.zeros_like(logits)  # (N,2,T) 1 for the real text, 0 for the drawn one
        labels[:, 0] = 1
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")  # (N,2,T)
        against = ((logits[:, 0] <= 0) & mask).any(dim=1)  # (N,) a character votes against the text
        print(
            f"judge: loss {losses.mT[mask].mean():.3f}  auc {auc(real, drawn):.3f}"
            f"  dissent {against[real > 0].float().mean():.3f}"
        )
        if rule:
            good = check(rule, both[:, 1:], batch.masked)[:, 0]  # (N,)
            for name, which in {"good": good, "wrong": ~good}.items():
                if which.any():
                    share = (drawn[which] > 0).float().mean()
                    print(f"it accepts {share:.3f} of the {name} completions")
