"""Draw a step's masked inputs and the random numbers that fill them, and share out the inputs.

Everything random about a step is drawn here, on the CPU, as a function of (seed, step) alone. So a
run can be resumed at any step, and several processes agree on the whole step before each of them
takes its share.

Shapes: B masked inputs, T characters, G completions of each input.
"""

import random
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from data.vocabulary import MASK_ID
from grpo.distributed import n_processes, share

# What a stream of random numbers is for, which is a part of its seed.
INPUTS, LETTERS, SHUFFLE, LATENTS, COINS, OWN = range(6)


class Rows:
    """Tensors with one row for each input. Indexing it indexes every tensor."""

    def __getitem__(self, rows):
        return self.map(lambda x: x[rows])

    def map(self, change):
        """Return a copy with `change` applied to every tensor, also inside nested `Rows`."""
        changed = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                changed[field.name] = change(value)
            elif isinstance(value, Rows):
                changed[field.name] = value.map(change)
        return replace(self, **changed)


@dataclass(frozen=True)
class Batch(Rows):
    """Hold texts with blanks, and the random numbers that will fill them."""

    tokens: torch.Tensor  # (B,T) the original text, without blanks
    masked: torch.Tensor  # (B,T) the text, with the mask token at its blanks
    mask: torch.Tensor  # (B,T) bool, True at a blank
    words: torch.Tensor  # (B,T) 1 in the first hidden word, 2 in the second, ...; 0 elsewhere
    uniforms: torch.Tensor  # (B,G,T) in [0,1) to draw the characters
    latent_uniforms: torch.Tensor  # (B,G,T) to draw z, if there's a latent
    coins: torch.Tensor  # (B,T) for a truncation that tosses one
    seed: tuple  # the batch is drawn from this seed


def draw_uniforms(shape, seed):
    """Draw float32 numbers in [0,1) on the CPU, so that a seed gives the same ones everywhere."""
    return torch.from_numpy(np.random.default_rng(seed).random(shape, dtype=np.float32))


def seed_all(seed, step):
    """Seed the random numbers of torch, numpy and random, for code that draws from these."""
    number = int(np.random.default_rng((seed, step, OWN)).integers(2**32))
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def make_batch(tokens, mask, words, G, seed):
    """Hide tokens where mask is True, and draw the random numbers for G fills of each input.

    tokens, mask and words are (B,T).
    """
    B, T = mask.shape
    return Batch(
        tokens=tokens,
        masked=tokens.masked_fill(mask, MASK_ID),
        mask=mask,
        words=words,
        uniforms=draw_uniforms((B, G, T), (*seed, LETTERS)),
        latent_uniforms=draw_uniforms((B, G, T), (*seed, LATENTS)),
        coins=draw_uniforms((B, T), (*seed, COINS)),
        seed=seed,
    )


def draw_batch(dataset, config, step, device):
    """Draw all inputs of a step: -> this process's share of them, a `Batch` on `device`."""
    size = config.batch_size * config.gradient_accumulation_steps * n_processes()
    seed = (config.seed, step)
    tokens, mask, words = dataset.batch(size, config.masking, (*seed, INPUTS))  # each (B,T)
    batch = make_batch(tokens, mask, words, config.group_size, seed)
    return batch.map(lambda x: share(x).to(device))


def minibatches(batch, epoch, config):
    """List the rows that each update of an epoch takes.

    By default there is one update, and it takes all rows. Otherwise we shuffle the rows and give
    each update `minibatch_size` of them, and the last one what is left. Each epoch has a shuffle of
    its own.
    """
    B = len(batch.mask)
    if not config.minibatch_size:
        return [torch.arange(B, device=batch.mask.device)]
    shuffled = np.random.default_rng((*batch.seed, SHUFFLE, epoch)).permutation(B)  # (B,)
    rows = torch.from_numpy(shuffled).to(batch.mask.device)  # (B,)
    return rows.split(config.minibatch_size)
