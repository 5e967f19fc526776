"""Fill the blanks in three other ways, to compare them with one-step filling.

Shapes: N inputs, M inputs that still have blanks, n fills of each, T characters, V vocabulary.
"""

from collections import Counter
from dataclasses import replace

import torch

from data.per_word import number_words, sum_over_words
from grpo.sampling import integer_weights


@torch.no_grad()
def fill_blank_by_blank(policy, batch, seed, surest=False):
    """Fill one blank of each input in each forward pass, until none is left: -> (N,1,T).

    Each pass sees what the passes before it filled in. It chooses a blank at random and draws its
    character. With `surest` it chooses the blank whose likeliest character is the most probable,
    and fills in that character.
    """
    filled = batch.masked.clone()  # (N,T)
    left = batch.mask.clone()  # (N,T)
    rng = torch.Generator().manual_seed(seed)
    while left.any():
        rows = left.any(dim=1).nonzero().squeeze(1)  # (M,)
        now = filled[rows]  # (M,T)
        still = left[rows]  # (M,T)
        at_hand = replace(batch[rows], masked=now, mask=still, words=number_words(still))
        q = policy(at_hand).marginal()
        if surest:
            weights = integer_weights(q.logits, q.sampling.temperature)  # (M,T,V)
            choice = weights.argmax(dim=-1)  # (M,T)
            preference = weights.amax(dim=-1) / weights.sum(dim=-1)  # (M,T)
        else:
            uniforms = torch.rand(*now.shape, 2, generator=rng).to(now.device)  # (M,T,2)
            choice = q.sample(uniforms[:, None]).completions[:, 0]  # (M,T)
            preference = uniforms[..., 1]  # (M,T)
        at = preference.masked_fill(~still, -1).argmax(dim=1, keepdim=True)  # (M,1)
        filled[rows] = now.scatter(1, at, choice.gather(1, at))
        left[rows] = still.scatter(1, at, False)
    return filled[:, None]  # (N,1,T)


def best_by_word(q, fills, scores):
    """Choose, for each word, the one of its n fills that is likeliest in real text: -> (N,1,T).

    fills and scores are (N,n,T). The judge's score of a word is log(p/q), where p is the word's
    probability in real text, and q its probability under the base model. We choose the word with
    the largest log p, which is log q + score. The score alone would prefer words that the base
    model finds rare.
    """
    log_q = sum_over_words(q.log_prob(fills), q.batch.words)  # (N,n,T)
    best = (log_q + scores).argmax(dim=1, keepdim=True)  # (N,1,T)
    return fills.take_along_dim(best, dim=1)  # (N,1,T)


def most_frequent_words(batch, text, vocabulary):
    """Fill every hidden word with the word of its length that `text` has most often: -> (N,1,T).

    This never looks at the visible letters. Even so, if whole words are hidden, almost every word
    that it fills in is valid. That is why the table calls it a cheat.
    """
    best = {}
    for word, _ in Counter(text.split()).most_common():
        best.setdefault(len(word), [vocabulary.index(c) for c in word])
    filled = batch.masked.clone()  # (N,T)
    for row, words in enumerate(batch.words):
        for number in range(1, int(words.max()) + 1):
            at = (words == number).nonzero().squeeze(1)
            letters = best.get(len(at), [1] * len(at))  # all "a" if no word has this length
            filled[row, at] = torch.tensor(letters, device=filled.device)
    return filled[:, None]
