"""Draw a step's masked inputs, and the random numbers that will fill them.

Everything random about a step is drawn here, on the CPU, from (seed, step) alone. So a run can be
resumed at any step, and several processes agree on the whole step before each takes its share. (And
two runs with the same seed meet the same inputs and draws, also if one goes on from the other.)

Shapes: B masked inputs, T characters, G completions of each input, E epochs (uses of a rollout).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from data.vocabulary import MASK_ID
from grpo import distributed

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
    """Texts with blanks, and the random numbers of a step, each in [0,1)."""

    tokens: Tensor  # (B,T) the original text, without blanks
    masked: Tensor  # (B,T) the text, with the mask token at its blanks
    mask: Tensor  # (B,T) bool, True at a blank
    uniforms: Tensor  # (B,G,T) draw the characters
    latents: Tensor  # (B,G) draw z, if there's a latent (grpo/latent.py)
    coins: Tensor  # (B,T) a coin for each blank, for a truncation (grpo/truncation.py)
    noise: Tensor  # (B,G) for a reward of your own
    orders: Tensor  # (B,E) the numbers of the inputs, shuffled anew for each epoch

    def first(self, n: int) -> "Batch":
        """Keep what the first n completions of each input need."""
        numbers = {name: getattr(self, name)[:, :n] for name in ("uniforms", "latents", "noise")}
        return replace(self, **numbers)


def make_uniforms(shape: tuple, seed: tuple) -> Tensor:
    """Make random float32 numbers in [0,1), on the CPU: a seed gives the same ones everywhere."""
    return torch.from_numpy(np.random.default_rng(seed).random(shape, dtype=np.float32))


def make_batch(tokens: Tensor, mask: Tensor, G: int, seed: tuple, epochs: int = 1) -> Batch:
    """Hide tokens (B,T) where mask (B,T) is True, and make what G completions of each need."""
    B, T = mask.shape
    orders = [np.random.default_rng((*seed, SHUFFLE, e)).permutation(B) for e in range(epochs)]
    batch = Batch(
        tokens=tokens,
        masked=tokens.masked_fill(mask, MASK_ID),
        mask=mask,
        uniforms=make_uniforms((B, G, T), (*seed, LETTERS)),
        latents=make_uniforms((B, G), (*seed, LATENTS)),
        coins=make_uniforms((B, T), (*seed, COINS)),
        noise=make_uniforms((B, G), (*seed, NOISE)),
        orders=torch.from_numpy(np.stack(orders, axis=1)),
    )
    return batch.map(lambda x: x.to(mask.device))


def draw_batch(dataset, config, step: int, device: torch.device) -> Batch:
    """Draw all inputs of a step, and return this process's share of them, on `device`."""
    size = config.batch_size * config.gradient_accumulation_steps * distributed.PROCESSES
    seed = (config.seed, step)
    tokens, mask = dataset.batch(size, config.masking, (*seed, INPUTS))  # each (B,T)
    batch = make_batch(tokens, mask, config.group_size, seed, config.num_iterations)
    if distributed.PROCESSES > 1:
        batch = batch.map(distributed.local_rows)
    return batch.map(lambda x: x.to(device))


def inputs_of_updates(batch: Batch, config) -> list[Tensor]:
    """List the numbers of the inputs that each update of a step takes: each (b,).

    By default each update takes all of them. With minibatch_size we shuffle them, anew in each
    epoch, and hand out that many at a time.
    """
    if config.minibatch_size:
        return [part for order in batch.orders.T for part in order.split(config.minibatch_size)]
    everything = torch.arange(len(batch.mask), device=batch.mask.device)  # (B,)
    return [everything] * config.num_iterations
