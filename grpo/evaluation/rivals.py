"""Fill the blanks in other ways than one-step drawing, to compare a policy with them.

Two rivals fill one blank after the other. Two choose among many draws, by the judge. Two are
cheats, which never look at the context. And a policy with a latent can be drawn from at other
temperatures.

Shapes: N inputs, M inputs that still have blanks, n fills of each, m draws to choose from,
T characters, V vocabulary. L letters of one hidden word, W words of this length.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F

from data.per_word import begins_word, sum_over_words
from data.vocabulary import encode
from grpo.batch import TARGET, draw_uniforms
from grpo.policy import integer_weights
from grpo.reward import log_odds

NEARLY_0 = 1e-3  # a temperature at which practically only the best has a chance


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
        at_hand = replace(batch[rows], masked=now, mask=still, words=words)
        q = policy(at_hand).marginal()
        if surest:
            weights = integer_weights(q.logits, q.config.temperature)  # (M,T,V)
            choice = weights.argmax(dim=-1)  # (M,T)
            preference = weights.amax(dim=-1) / weights.sum(dim=-1)  # (M,T)
        else:
            uniforms = torch.rand(*now.shape, 2, generator=rng).to(now.device)  # (M,T,2)
            choice = q.sample(uniforms[:, None]).completions[:, 0]  # (M,T)
            preference = uniforms[..., 1]  # (M,T)
        at = preference.masked_fill(~still, -1).argmax(dim=1, keepdim=True)  # (M,1)
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


def target(q, judge, beta, m=64):
    """Approximate what the reward and the KL ask for, with words that q can draw: -> (N,n,T).

    The best policy is q · exp(score / β), where q is the base model. For each word we choose one of
    m draws of q with weights exp(score / β), n times. The judge scores a word beside the other
    words of its draw, but we choose each word by itself. The batch's random numbers for latents
    choose, so the draws get others.
    """
    batch = q.batch
    N, _, T = batch.uniforms.shape[:3]
    uniforms = draw_uniforms((N, m, T, 2), (*batch.seed, TARGET)).to(batch.mask.device)  # (N,m,T,2)
    draws = q.sample(uniforms).completions  # (N,m,T)
    scores = log_odds(judge, draws, batch.words)  # (N,m,T)
    weights = (scores / max(beta, NEARLY_0)).softmax(dim=1)  # (N,m,T), the best score if β is 0
    up_to = weights.cumsum(dim=1).mT.contiguous()  # (N,T,m)
    choosing = batch.uniforms[..., 1].mT.contiguous()  # (N,T,n)
    chosen = torch.searchsorted(up_to, choosing, right=True).clamp(max=m - 1).mT  # (N,n,T)
    once = chosen.float() * begins_word(batch.words)[:, None]  # (N,n,T) what first blanks chose
    chosen = sum_over_words(once, batch.words).long()  # (N,n,T) the same for the whole word
    return draws.take_along_dim(chosen, dim=1)


def temper(q, choose):
    """Return the `Latent` q with its prior at the temperature `choose`, and its letters at 0."""
    return replace(q, prior=q.prior / choose, letters=q.letters / NEARLY_0)


def fill_blindly(batch, text):
    """Fill each hidden word with a word of its length: -> common (N,1,T), random (N,n,T).

    `common` has the word that `text` has most often. `random` has words drawn as often as `text`
    has them. If it has none of this length, both write only "a". They never look at the visible
    letters. Even so, if whole words are hidden, almost every word that they fill in is valid. That
    is why the table calls them cheats.
    """
    counted = Counter(text.split()).most_common()  # most frequent first

    @cache
    def words_of(length):
        """Return the words of this length (W,L), and the running sum of their counts (W,)."""
        own = [pair for pair in counted if len(pair[0]) == length] or [("a" * length, 1)]
        words, counts = zip(*own)
        letters = encode("".join(words)).view(-1, length)  # (W,L)
        return letters, torch.tensor(counts).cumsum(dim=0).double()

    on_cpu = batch.map(torch.Tensor.cpu)
    uniforms = F.pad(on_cpu.uniforms[..., 1], (0, 0, 1, 0))  # (N,1+n,T) the 0 in front for `common`
    fills = on_cpu.masked[:, None].repeat(1, uniforms.shape[1], 1)  # (N,1+n,T)
    for row, numbers in enumerate(on_cpu.words):
        for number in range(1, int(numbers.max()) + 1):
            at = (numbers == number).nonzero().squeeze(1)  # (L,)
            words, up_to = words_of(len(at))  # (W,L), (W,)
            drawn = uniforms[row, :, at[0]] * up_to[-1]  # (1+n,)
            fills[row, :, at] = words[torch.searchsorted(up_to, drawn, right=True)]  # (1+n,L)
    fills = fills.to(batch.mask.device)
    return fills[:, :1], fills[:, 1:]
