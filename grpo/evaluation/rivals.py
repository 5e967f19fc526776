"""Fill the blanks in other ways than one-step drawing, to compare a policy with them.

Some fill one blank after the other, one chooses among many draws, and one cheats: it never looks at
the context.

Shapes: N inputs, M inputs that still have blanks, n fills of each, T characters, V vocabulary, L
letters of one hidden word.
"""

from collections import Counter
from dataclasses import replace

import torch

from data.per_word import sum_over_words
from data.vocabulary import encode
from grpo.policy import log_softmax


@torch.no_grad()
def fill_blank_by_blank(policy, batch, number_words, seed, surest=False, n=1):
    """Fill one blank in each forward pass, until none is left, n times: -> (N,n,T).

    Each pass sees what the passes before it filled in. It chooses a blank at random and draws its
    character. With `surest` it chooses the blank whose likeliest character is the most probable,
    and fills in that character. number_words(tokens, mask) says which blanks are one word.
    """
    N, T = batch.masked.shape
    batch = batch[torch.arange(N, device=batch.masked.device).repeat_interleave(n)]
    filled = batch.masked.clone()  # (N·n,T)
    left = batch.mask.clone()  # (N·n,T)
    rng = torch.Generator().manual_seed(seed)
    while left.any():
        rows = left.any(dim=1).nonzero().squeeze(1)  # (M,)
        now = filled[rows]  # (M,T)
        still = left[rows]  # (M,T)
        words = number_words(batch.tokens[rows], still)  # (M,T)
        uniforms, order = torch.rand(2, *now.shape, generator=rng).to(now.device)  # each (M,T)
        at_hand = replace(
            batch[rows], masked=now, mask=still, words=words, uniforms=uniforms[:, None]
        )
        q = policy(at_hand).marginal()
        if surest:
            choice = q.best_guess()  # (M,T)
            preference = log_softmax(q.logits, q.config.temperature).amax(dim=-1)  # (M,T)
        else:
            choice = q.sample().completions[:, 0]  # (M,T)
            preference = order
        at = preference.masked_fill(~still, -torch.inf).argmax(dim=1, keepdim=True)  # (M,1)
        filled[rows] = now.scatter(1, at, choice.gather(1, at))
        left[rows] = still.scatter(1, at, False)
    return filled.view(N, n, T)


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


def fill_with_common_words(batch, text):
    """Fill each hidden word with the word of its length that `text` has most often: -> (N,1,T).

    It never looks at the visible letters. Even so, if whole words are hidden, nearly all that it
    writes are words, which is why the table calls it a cheat.
    """
    common = {}  # {length: the most frequent word}
    for word, _ in Counter(text.split()).most_common():
        common.setdefault(len(word), word)
    masked, numbers = batch.masked.cpu(), batch.words.cpu()  # each (N,T)
    fills = masked.clone()
    for row in range(len(fills)):
        for number in range(1, int(numbers[row].max()) + 1):
            at = (numbers[row] == number).nonzero().squeeze(1)  # (L,)
            fills[row, at] = encode(common.get(len(at), "a" * len(at)))
    return fills[:, None].to(batch.mask.device)
