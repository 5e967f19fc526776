"""Draw a step's masked inputs, and the random numbers that will fill them.

Everything random about a step is drawn here, on the CPU, from (seed, step) alone. So a run can be
resumed at any step, and several processes agree on the whole step before each takes its share.

Shapes: B masked inputs, T characters, G completions of each input.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from data.vocabulary import MASK_ID
from grpo.distributed import local_rows, n_processes

# One number per stream of random numbers. It's a part of that stream's seed.
INPUTS, LETTERS, SHUFFLE, LATENTS, COINS, NOISE = range(6)


class Rows:
    """Tensors with one row for each input. Index it, and you index every one of them."""

    def __getitem__(self, rows) -> "Rows":
        return self.map(lambda x: x[rows])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        """Return a copy with `change` applied to all tensors, also those in a dict or `Rows`."""
        changed = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = change(value)
            elif isinstance(value, Rows):
                changed[field.name] = value.map(change)
            elif isinstance(value, dict):
                changed[field.name] = {name: change(x) for name, x in value.items()}
        return replace(self, **changed)


@dataclass(frozen=True)
class Batch(Rows):
    """Texts with blanks, and the random numbers that will fill them."""

    tokens: Tensor  # (B,T) the original text, without blanks
    masked: Tensor  # (B,T) the text, with the mask token at its blanks
    mask: Tensor  # (B,T) bool, True at a blank
    uniforms: Tensor  # (B,G,T) in [0,1) to draw the characters
    rows: Tensor  # (B,) the numbers of these inputs among all inputs of the step
    size: int  # how many inputs the step has
    seed: tuple  # what all of this is drawn from: (the run's seed, the step)

    def more_uniforms(self, stream: int, *shape: int) -> Tensor:
        """Make numbers in [0,1) for each input: -> (B,*shape), the same ones each time.

        They're made for all inputs of the step, so it doesn't matter which of them are here.
        """
        every = make_uniforms((self.size, *shape), (*self.seed, stream))
        return every.to(self.rows.device)[self.rows]

    def latent_uniforms(self) -> Tensor:
        """Make what picks z, if there's a latent: -> (B,G)."""
        return self.more_uniforms(LATENTS, self.uniforms.shape[1])

    def noise(self, *shape: int) -> Tensor:
        """Make numbers for a reward of your own: -> (B,*shape), independent of all others.

        Don't seed with `seed` itself: numpy pads it with zeros, and (seed, step, 0) picks inputs.
        """
        return self.more_uniforms(NOISE, *shape)

    def coins(self) -> Tensor:
        """Toss a coin for each blank, for a truncation that needs one: -> (B,T)."""
        return self.more_uniforms(COINS, self.uniforms.shape[2])


def make_uniforms(shape: tuple, seed: tuple) -> Tensor:
    """Make random float32 numbers in [0,1), on the CPU: a seed gives the same ones everywhere."""
    return torch.from_numpy(np.random.default_rng(seed).random(shape, dtype=np.float32))


def make_batch(tokens: Tensor, mask: Tensor, G: int, seed: tuple) -> Batch:
    """Hide tokens (B,T) where mask (B,T) is True, and make uniforms for G completions of each."""
    B, T = mask.shape
    return Batch(
        tokens=tokens,
        masked=tokens.masked_fill(mask, MASK_ID),
        mask=mask,
        uniforms=make_uniforms((B, G, T), (*seed, LETTERS)).to(mask.device),
        rows=torch.arange(B, device=mask.device),
        size=B,
        seed=seed,
    )


def draw_batch(dataset, config, step: int, device: torch.device) -> Batch:
    """Draw all inputs of a step, and return this process's share of them, on `device`."""
    size = config.batch_size * config.gradient_accumulation_steps * n_processes()
    seed = (config.seed, step)
    tokens, mask = dataset.batch(size, config.masking, (*seed, INPUTS))  # each (B,T)
    batch = make_batch(tokens, mask, config.group_size, seed)
    return batch.map(lambda x: local_rows(x).to(device))


def minibatches(batch: Batch, epoch: int, config) -> list[Tensor]:
    """List the numbers of the inputs that each update of an epoch takes.

    By default there's one update, and it takes all of them. With minibatch_size we shuffle them,
    anew in each epoch, and hand out that many at a time.
    """
    B = len(batch.mask)
    if not config.minibatch_size:
        return [torch.arange(B, device=batch.mask.device)]
    shuffled = np.random.default_rng((*batch.seed, SHUFFLE, epoch)).permutation(B)  # (B,)
    rows = torch.from_numpy(shuffled).to(batch.mask.device)  # (B,)
    return rows.split(config.minibatch_size)
