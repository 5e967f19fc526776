"""What the two models of GRPO learn from: inputs with blanks, fills to tell apart, and the losses.

The generator learns masked characters (1810.04805) under every masking that GRPO may use, partly
revealed ones included, since filling blank by blank passes through those. The judge learns, for
every character, whether its word is the original one (after ELECTRA's replaced-token detection,
2003.10555). Whatever the judge was never shown, GRPO finds; so it sees originals, the generator's
own one-step fills at several temperatures, plainly wrong fills, and true words in the wrong place.

Letters: B inputs, T characters, V vocabulary. The models are functions of tokens on the CPU;
`args` are the settings of `model/pretrain.py`.
"""

import numpy as np
import torch
import torch.nn.functional as F

from data.masking import parse_masking, whole_words
from grpo.sampling import sample_completions

MASKING = "word:0.5,random:0.25,span:0.1,sticky:0.15"
TEMPERATURES = {  # of the fills that the judge sees, with the share of each
    0.1: 0.15,  # argmax, all but
    0.4: 0.15,
    0.7: 0.15,
    1.0: 0.35,
    1.25: 0.1,
    1.5: 0.1,
}
# Training showed the judge about as many real words as wrong ones. Of what a policy draws most is
# wrong: the prior odds of "real" are lowered by this factor e^-DOUBT (Bayes' rule, in the logit).
# Else a common word in the wrong place scores most of what the right one does.
DOUBT = 3.0


def masked_batch(dataset, size, block_size, masking, seed):
    """Inputs at every difficulty: tokens (B,T), mask (B,T).

    In four rows of ten, part of the blanks is revealed again.
    """
    rng = np.random.default_rng((*seed, 1))
    ratio = rng.uniform(0.1, 0.6, size)  # (B,)
    words = rng.integers(1, 6, size)  # (B,)
    masking = parse_masking(masking)
    tokens, mask = dataset.batch(size, block_size, masking, ratio, words, (*seed, 0))  # (B,T) twice
    whole = rng.random(size) < 0.6  # (B,) does all stay hidden?
    share = rng.random(size)  # (B,) else this much
    hide = np.where(whole, 1.0, share)  # (B,)
    stays = rng.random(mask.shape) < hide[:, None]  # (B,T)
    return tokens, mask & torch.from_numpy(stays)


def generator_loss(generator, dataset, args, seed):
    """Mean cross-entropy of the hidden characters, in nats."""
    size = args.batch_size
    tokens, mask = masked_batch(dataset, size, args.block_size, args.masking, seed)  # (B,T) twice
    masked = tokens.masked_fill(mask, dataset.mask_id)  # (B,T)
    logits = generator(masked)  # (B,T,V)
    return F.cross_entropy(logits[mask].float(), tokens[mask])


@torch.no_grad()
def wrong_fills(generator, dataset, tokens, mask, seed):
    """Fill the blanks in many wrong ways: (B,T) -> completions (B,T)."""
    rng = np.random.default_rng(seed)
    B, T = tokens.shape
    shares = list(TEMPERATURES.values())
    temperatures = list(TEMPERATURES)
    temperature = rng.choice(temperatures, size=(B, 1, 1), p=shares)
    temperature = torch.from_numpy(temperature).float()  # (B,1,1)
    uniforms = rng.random((B, 1, T), dtype=np.float32)
    uniforms = torch.from_numpy(uniforms)  # (B,1,T)
    position = rng.integers(len(dataset.tokens), size=(B, T))
    unigram = torch.from_numpy(dataset.tokens[position]).long()  # (B,T)
    character = rng.integers(dataset.mask_id, size=(B, 1))
    repeated = torch.from_numpy(character).expand(B, T)  # (B,T)
    kind = rng.choice(4, p=[0.70, 0.10, 0.05, 0.15], size=B)
    kind = torch.from_numpy(kind)  # (B,)

    masked = tokens.masked_fill(mask, dataset.mask_id)  # (B,T)
    logits = generator(masked)  # (B,T,V)
    drawn, _ = sample_completions(logits, masked, mask, uniforms, temperature)  # (B,1,T)
    # fmt: off
    fills = torch.stack([drawn[:, 0],  # 70 %: the generator's own draws
                         unigram,      # 10 %: characters of the text, blind to everything
                         repeated,     #  5 %: one character, repeated
                         tokens])      # 15 %: nothing wrong
    # fmt: on
    chosen = fills[kind, torch.arange(B)]  # (B,T)
    return torch.where(mask, chosen, tokens)  # (B,T)


def words_by_length(dataset):
    """The different words of the text: {length: ((n,length) tokens, (n,) shares)}.

    Shares by the square root of how often a word occurs: by the frequency itself the judge would
    learn to doubt common words, by equal shares to doubt rare ones.
    """
    spaces = np.flatnonzero(np.isin(dataset.tokens, dataset.spaces))
    starts = spaces[:-1] + 1
    lengths = np.diff(spaces) - 1
    words = {}
    for length in np.unique(lengths[lengths > 0]):
        first = starts[lengths == length]  # (occurrences,)
        position = first[:, None] + np.arange(length)
        found = dataset.tokens[position]  # (occurrences,length)
        different, counts = np.unique(found, axis=0, return_counts=True)
        weights = counts**0.5
        words[length] = different, weights / weights.sum()
    return words


def swap_words(dataset, words, tokens, seed, share=0.25):
    """Put another word of the same length in the place of a `share` of the words: (B,T) -> (B,T).

    Only a judge that reads the words around can tell. Without these it takes any common word for
    real, and GRPO fills `the` and `function` everywhere.
    """
    rng = np.random.default_rng(seed)
    completions = tokens.numpy().copy()  # (B,T)
    for row in completions:
        for start, end in whole_words(np.isin(row, dataset.spaces)):
            length = end - start
            if length in words and rng.random() < share:
                different, shares = words[length]
                chosen = rng.choice(len(different), p=shares)
                row[start:end] = different[chosen]
    return torch.from_numpy(completions)


def by_word(flags, is_space):
    """Is any flag set in the word that a character stands in? (B,T) bool twice -> (B,T) bool.

    A space belongs to the word after it.
    """
    word = is_space.long().cumsum(dim=1)  # (B,T) number of the word
    flagged = torch.zeros_like(word).scatter_add_(1, word, flags.long())  # (B,T) by number
    return flagged.gather(1, word) > 0


def weigh(losses, flags, share):
    """The mean of the flagged losses weighs `share`, that of the others the rest: -> a scalar."""
    mean = losses[flags].sum() / flags.sum().clamp(min=1)
    mean_of_others = losses[~flags].sum() / (~flags).sum().clamp(min=1)
    return share * mean + (1 - share) * mean_of_others


def judge_loss(judge, generator, dataset, words, args, seed):
    """Mean binary cross-entropy, in nats a character, of "the word here is the original one".

    One label per word, not per character: a parallel fill is drawn blind to itself, so whether a
    single character is the original says little about its neighbours, whereas a word is right only
    if its characters agree. Half of the rows are fills of blanks, where the words that had blanks
    weigh 0.85; half have swapped words, where real and swapped weigh the same.
    """
    half = args.batch_size // 2
    tokens, mask = masked_batch(dataset, half, args.block_size, MASKING, seed)  # (B/2,T) twice
    fills = wrong_fills(generator, dataset, tokens, mask, (*seed, 2))  # (B/2,T)
    others, _ = dataset.batch(half, args.block_size, {"random": 1.0}, 0, 0, (*seed, 7))  # (B/2,T)
    swapped = swap_words(dataset, words, others, (*seed, 3))  # (B/2,T)
    completions = torch.cat([fills, swapped])  # (B,T)
    tokens = torch.cat([tokens, others])  # (B,T)
    spaces = torch.from_numpy(dataset.spaces)
    is_space = torch.isin(tokens, spaces)  # (B,T)
    changed = completions != tokens  # (B,T)
    real = ~by_word(changed, is_space)  # (B,T)
    logits = judge(completions).float()  # (B,T)
    losses = F.binary_cross_entropy_with_logits(logits, real.float(), reduction="none")  # (B,T)
    hidden = by_word(mask, is_space[:half])  # (B/2,T)
    of_fills = weigh(losses[:half], hidden, 0.85)
    of_swapped = weigh(losses[half:], real[half:], 0.5)
    return 0.5 * of_fills + 0.5 * of_swapped
