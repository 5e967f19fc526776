"""Measure the generator and the judge on held-out inputs, which hide what GRPO will hide.

Shapes: B inputs, T characters, N hidden words.
"""

import torch
import torch.nn.functional as F

from data.per_word import all_of_word, begins_word, mean_over_words
from data.rules import check_gaps
from grpo.batch import make_batch
from grpo.reward import judge_logits
from model.losses import draw_completions

REPORT = 2**31 + 2  # begins the seeds here, so that no training draws the same random numbers


def auc(real, drawn):
    """Compute how often a real word scores more than a drawn one: (N,), (N,) -> a number.

    The number is a share of all N · N pairs of a real and a drawn word. A tie counts half.
    """
    drawn = drawn.sort().values
    below = torch.searchsorted(drawn, real)  # (N,) how many drawn words score less
    up_to = torch.searchsorted(drawn, real, right=True)  # (N,) how many score less or the same
    return (below + up_to).double().mean().item() / (2 * len(drawn))


@torch.no_grad()
def report(policy, judge, dataset, rule, masking, device, size=3072):
    """Print how well the policy fills blanks, and the judge tells completions from text.

    The policy gets its mean −log q of a hidden character, in nats. The judge gets its loss, its AUC
    (0.5 is chance), and the mean of exp(score) over the policy's draws. For scores that really are
    log p/q that's Σ q · p/q = 1. Its dissent says how often one of its characters votes against a
    real word that the mean accepts. If a rule knows which completions are correct, we also print
    how many of those the judge accepts, and how many of the others.
    """
    batch = make_batch(*dataset.batch(size, masking, (REPORT, 0)), 1, (REPORT, 0))
    batch = batch.map(lambda x: x.to(device))
    tokens, mask, words = batch.tokens, batch.mask, batch.words  # each (B,T)
    log_q = policy(batch).log_likelihood(tokens[:, None])  # (B,1,T)
    print(f"held-out inputs with masking={masking}: nats {-log_q.sum() / mask.sum():.3f}")
    if judge:
        both = torch.stack([tokens, draw_completions(policy, batch, 1.0)], dim=1)  # (B,2,T)
        logits = judge_logits(judge, both)  # (B,2,T)
        scores = mean_over_words(logits, words)  # (B,2,T)
        first = begins_word(words)  # (B,T)
        real, drawn = scores.mT[first].T.contiguous()  # each (N,)
        labels = torch.zeros_like(logits)  # (B,2,T) 1 for the real text, 0 for the drawn one
        labels[:, 0] = 1
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")  # (B,2,T)
        unanimous = all_of_word(logits[:, :1] > 0, words)[:, 0]  # (B,T)
        print(
            f"judge: loss {losses.mT[mask].mean():.3f}  auc {auc(real, drawn):.3f}"
            f"  mean p/q {drawn.exp().mean():.2f}"
            f"  dissent {1 - unanimous[first][real > 0].float().mean():.3f}"
        )
        good, gaps = check_gaps(rule, both[:, 1:], tokens, mask)  # (B,1,T), (B,T)
        accepted = all_of_word(scores[:, 1:] > 0, gaps)  # (B,1,T)
        wrong = begins_word(gaps)[:, None] & ~good  # (B,1,T)
        for name, which in {"correct": good, "wrong": wrong}.items():
            if which.any():
                share = accepted[which].float().mean()
                print(f"it accepts {share:.3f} of the {name} completions")
