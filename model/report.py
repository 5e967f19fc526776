"""Measure the generator and the judge on held-out text, with four ways of hiding parts of it.

Shapes: B inputs, T characters, N hidden words.
"""

import torch

from data.dataset import MASK_ID
from data.masking import parse_masking
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


def calibration(real, drawn, inputs):
    """Fit P(real) = σ(slope · score): -> the slope, and its standard error.

    real and drawn (N,) are scores in nats, and `inputs` (N,) says which input each word comes from.
    With a slope of 1 the judge is calibrated. With a larger slope its scores are too close to 0. We
    fit a logistic regression without intercept, by Newton's method. Words of the same input are not
    independent, so the standard error is that of Liang & Zeger (1986), the sandwich estimator.
    """
    x = torch.cat([real, drawn]).double()  # (2N,)
    y = torch.cat([torch.ones_like(real), torch.zeros_like(drawn)]).double()  # (2N,)
    slope = 0.0
    for _ in range(50):
        p = (slope * x).sigmoid()
        curvature = (p * (1 - p) * x * x).sum()
        slope = slope + ((y - p) * x).sum() / curvature
    p = (slope * x).sigmoid()
    curvature = (p * (1 - p) * x * x).sum()
    return slope.item(), (spread_of_sum((y - p) * x, inputs.repeat(2)) / curvature).item()


def mean_odds(drawn, inputs):
    """Average exp(score) over drawn words (N,): -> the mean, and its standard error.

    If the scores are log p/q, the mean over draws from q is Σ q · p/q = 1. The standard error adds
    up the words of each input (N,) first, as that of `calibration` does.
    """
    odds = drawn.double().exp()  # (N,)
    mean = odds.mean()
    return mean.item(), (spread_of_sum(odds - mean, inputs) / len(odds)).item()


def spread_of_sum(x, inputs):
    """Estimate the standard error of the sum of x (N,), whose mean is 0: -> a scalar.

    `inputs` (N,) says which input each x comes from. Inputs are independent of each other, and so
    we square the sums of the inputs, and not each x.
    """
    sums = x.new_zeros(int(inputs.max()) + 1).index_add(0, inputs, x)  # one for each input
    return sums.square().sum().sqrt()


@torch.no_grad()
def word_scores(policy, judge, batch):
    """Let the judge score each hidden word twice, as it is in the text and as the policy draws it.

    Returns three tensors (N,), with one number for each hidden word: the score of the text's word,
    the score of the drawn word, and the row of the word's input in the batch. No score is clipped.
    """
    drawn = draw_fills(policy, batch, 1.0)  # (B,T)
    both = torch.stack([batch.tokens, drawn], dim=1)  # (B,2,T)
    scores = mean_over_words(judge_logits(judge, both), batch.words)  # (B,2,T)
    first = begins_word(batch.words)  # (B,T)
    of_text, of_draws = scores.mT[first].T.contiguous()  # each (N,)
    return of_text, of_draws, first.nonzero()[:, 0]


def held_out_batch(dataset, block_size, test, size=3072):
    """Draw `size` inputs, hide parts of them as `TESTS[test]` says, and return a `Batch`."""
    i = [*TESTS].index(test)
    masking, ratio, hidden = TESTS[test]
    parts = parse_masking(masking)
    texts = dataset.batch(size, block_size, parts, ratio, hidden, (REPORT, i))  # each (B,T)
    return make_batch(*texts, MASK_ID, 1, (REPORT, i))


@torch.no_grad()
def report(policy, judge, dataset, args):
    """Print how well the policy fills blanks, and how well the judge tells fills from real text.

    Each of the TESTS gets two lines. The first has the mean −log q of a hidden character in nats,
    the share of hidden characters that the policy's best guess restores, and the judge's AUC (0.5
    is chance). The second has the slope that `calibration` fits to the judge's scores, and the mean
    of p/q over the policy's draws, each with its standard error (se). Both are 1 if the scores are
    log p/q.
    """
    for test in TESTS:
        batch = held_out_batch(dataset, args.block_size, test)
        q = policy(batch)
        nats = -q.log_prob(batch.tokens[:, None]).sum() / batch.mask.sum()
        restored = (q.best_guess() == batch.tokens)[batch.mask].double().mean()
        real, drawn, inputs = word_scores(policy, judge, batch)
        slope, se = calibration(real, drawn, inputs)
        odds, se_of_odds = mean_odds(drawn, inputs)
        print(
            f"{test}: nats {nats:.3f}  characters {restored:.3f}  auc {auc(real, drawn):.3f}\n"
            f"  slope {slope:.2f} (se {se:.2f})  mean p/q {odds:.2f} (se {se_of_odds:.2f})",
            flush=True,
        )
