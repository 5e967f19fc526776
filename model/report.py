"""Measure the generator and the judge on held-out text, with four ways of hiding parts of it.

Shapes: B inputs, T characters, N hidden words.
"""

import torch

from data.per_word import begins_word, mean_over_words
from grpo.batch import make_batch
from grpo.reward import judge_logits
from model.losses import draw_fills

REPORT = 2**31 + 2  # begins the seeds here, so that no training draws the same random numbers
TESTS = {  # what is hidden: (masking, ratio, hidden words)
    "random characters": ("random", 0.15, 0),
    "one word": ("word", 0, 1),
    "two words": ("word", 0, 2),
    "three short words": ("short", 0, 3),
}


def auc(real, drawn):
    """Compute how often a real word scores more than a drawn one: (N,), (N,) -> a number.

    The number is a share of all N · N pairs of a real and a drawn word. A tie counts half.
    """
    drawn = drawn.sort().values
    below = torch.searchsorted(drawn, real)  # (N,) how many drawn words score less
    up_to = torch.searchsorted(drawn, real, right=True)  # (N,) how many score less or the same
    return (below + up_to).double().mean().item() / (2 * len(drawn))


def calibration(real, drawn):
    """Fit P(real) = σ(slope · score) to scores in nats: (N,), (N,) -> the slope.

    With a slope of 1 the judge is calibrated. With a larger slope its scores are too close to 0. We
    fit a logistic regression without intercept, by Newton's method.
    """
    x = torch.cat([real, drawn]).double()  # (2N,)
    y = torch.cat([torch.ones_like(real), torch.zeros_like(drawn)]).double()  # (2N,)
    slope = 0.0
    for _ in range(50):
        p = (slope * x).sigmoid()
        curvature = (p * (1 - p) * x * x).sum()
        slope = slope + ((y - p) * x).sum() / curvature
    return slope.item()


@torch.no_grad()
def word_scores(policy, judge, batch):
    """Let the judge score each hidden word twice, as it is in the text and as the policy draws it.

    Returns two tensors (N,), with one number for each hidden word: the score of the text's word,
    and the score of the drawn word. No score is clipped.
    """
    drawn = draw_fills(policy, batch, 1.0)  # (B,T)
    both = torch.stack([batch.tokens, drawn], dim=1)  # (B,2,T)
    scores = mean_over_words(judge_logits(judge, both), batch.words)  # (B,2,T)
    return scores.mT[begins_word(batch.words)].T.contiguous()  # (2,N)


def held_out_batch(dataset, test, size=3072):
    """Draw `size` inputs, hide parts of them as `TESTS[test]` says, and return a `Batch`."""
    i = [*TESTS].index(test)
    texts = dataset.batch(size, *TESTS[test], (REPORT, i))  # each (B,T)
    return make_batch(*texts, 1, (REPORT, i))


@torch.no_grad()
def report(policy, judge, dataset):
    """Print how well the policy fills blanks, and how well the judge tells fills from real text.

    Each of the TESTS gets a line. It has the mean −log q of a hidden character in nats, the share
    of hidden characters that the policy's best guess restores, the judge's AUC (0.5 is chance), the
    slope that `calibration` fits to its scores, and the mean of exp(score) over the policy's draws.
    If the scores are log p/q, this mean is Σ q · p/q = 1, and the slope is 1, too.
    """
    for test in TESTS:
        batch = held_out_batch(dataset, test)
        q = policy(batch)
        nats = -q.log_prob(batch.tokens[:, None]).sum() / batch.mask.sum()
        restored = (q.best_guess() == batch.tokens)[batch.mask].double().mean()
        real, drawn = word_scores(policy, judge, batch)
        slope, odds = calibration(real, drawn), drawn.exp().mean()
        print(
            f"{test}: nats {nats:.3f}  restored {restored:.3f}  auc {auc(real, drawn):.3f}"
            f"  slope {slope:.2f}  mean p/q {odds:.2f}",
            flush=True,
        )
