"""Fill the blanks in other ways than one parallel draw, to compare a policy with them.

Some take several passes, one chooses among many draws, and one cheats: it never looks at the
context.

Shapes: N inputs, T characters, n completions of each input, M completions of all inputs.
"""

import re
from collections import Counter

import torch
from torch import Tensor

from data.vocabulary import BLANK, decode, encode
from grpo.batch import Batch, make_batch
from grpo.policy import Policy, Product

PASSES = 2**31 + 3  # begins the seeds here, so that no training draws the same random numbers


@torch.no_grad()
def fill_in_passes(
    policy: Policy, batch: Batch, order: str, passes: int = 0, n: int = 0
) -> tuple[Tensor, float]:  # (N,n,T)
    """Fill the blanks in several forward passes, each of which sees what the others filled in.

    `order` is `confidence` (the blanks whose most likely character is the most probable go first),
    `left to right` or `right to left`. Each pass fills an equal share of the blanks; with passes=0
    it fills only one. This draws n completions of each input, but for the last pass, which takes
    the policy's best guess. With n=0 all passes do. Returns the completions, and how many passes an
    input took on average.
    """
    N, T = batch.masked.shape
    batch = batch[torch.arange(N, device=batch.mask.device).repeat_interleave(max(n, 1))]
    blanks = batch.mask.sum(dim=1)  # (M,)
    planned = blanks.clamp(max=passes) if passes else blanks  # (M,) how many passes each input gets
    filled, left = batch.masked.clone(), batch.mask.clone()  # (M,T)
    for done in range(int(planned.max())):
        q = policy(filled)
        best = q.best_guess()  # (M,T)
        characters = best
        if n:
            last = (planned - done == 1)[:, None]  # (M,1)
            now = make_batch(filled, left, 1, (PASSES, done))
            characters = torch.where(last, best, q.sample(now).completions[:, 0])  # (M,T)
        preference = torch.arange(T, device=left.device).expand(left.shape).float()  # (M,T)
        if order == "left to right":
            preference = -preference
        elif order == "confidence":
            preference = q.log_likelihood(best[:, None])[:, 0]  # (M,T)
        rank = preference.masked_fill(~left, -torch.inf).argsort(dim=1, descending=True).argsort()
        share = (left.sum(dim=1) / (planned - done).clamp(min=1)).ceil()  # (M,)
        chosen = left & (rank < share[:, None])  # (M,T)
        filled = torch.where(chosen, characters, filled)
        left = left & ~chosen
    return filled.view(N, -1, T), planned.float().mean().item()


def best_by_judge(q: Product, completions: Tensor, scores: Tensor) -> Tensor:
    """Choose the completion that's the most likely in real text: (N,n,T), (N,n) -> (N,1,T).

    An ideal judge's score is log(p/q): p is how likely a completion is in real text, and q how
    likely under the base model. The largest p has the largest log q + score. The score alone would
    prefer whatever the base model finds unlikely.
    """
    log_q = q.log_likelihood(completions).sum(dim=-1)  # (N,n)
    best = (log_q + scores).argmax(dim=1)  # (N,)
    return completions.take_along_dim(best[:, None, None], dim=1)  # (N,1,T)


def fill_with_common_words(batch: Batch, lexicon: Counter) -> Tensor:  # (N,1,T)
    """Fill each run of blanks with the most frequent word of its length.

    It never looks at the visible letters, and still nearly all that it writes are words.
    """
    common = {}  # {length: the most frequent word}
    for word, _ in lexicon.most_common():
        common.setdefault(len(word), word)

    def fill(run: re.Match) -> str:
        length = len(run[0])
        return common.get(length, "a" * length)

    filled = [encode(re.sub(BLANK + "+", fill, masked)) for masked in decode(batch.masked)]
    return torch.stack(filled)[:, None].to(batch.mask.device)
