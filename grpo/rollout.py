"""A step's inputs and random numbers, what came of them, and the batches its updates take.

The draws themselves are in grpo/sampling.py.

Letters: B inputs, T characters of each, G completions of each input, V characters of vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch

from data.masking import parse_masking
from grpo.logprobs import LogProbs
from grpo.plumbing.distributed import gather, share, world
from grpo.sampling import Fills


class Inputs(NamedTuple):
    """Text with blanks, and the random numbers that will fill them: a function of (seed, step)."""

    tokens: torch.Tensor  # (B,T) the text
    mask: torch.Tensor  # (B,T) bool, True at a blank
    masked: torch.Tensor  # (B,T) the text, its blanks replaced by the mask token
    uniforms: torch.Tensor  # (B,G,T) float32 in [0,1): each decides one draw
    z_uniforms: torch.Tensor  # (B,G,T) as uniforms: of a mixture, each decides one z
    orders: torch.Tensor = None  # (B,E) in which each of E passes takes the inputs, in mini-batches


def take_rows(x, index):
    """x[index] of a tensor, or of every tensor in a named tuple."""
    if isinstance(x, tuple):
        return type(x)(*(take_rows(each, index) for each in x))
    return None if x is None else x[index]


class Rollout(NamedTuple):
    """Completions as they were drawn and scored. Nothing of this changes while the policy does."""

    inputs: Inputs
    fills: Fills
    ref_logits: torch.Tensor  # (B,T,V)
    old: LogProbs  # as they were drawn
    credits: torch.Tensor  # (B,G,1) or (B,G,T)
    advantages: torch.Tensor  # as credits

    def take(self, index):
        """Some of the inputs: a slice, or their numbers in any order."""
        return take_rows(self, index)

    def split(self, size):
        """Batches of `size` inputs, in order."""
        return [self.take(slice(i, i + size)) for i in range(0, len(self.advantages), size)]

    def updates(self, config):
        """A batch for each optimizer step: num_iterations passes, whole or in shuffled parts."""
        for order in self.inputs.orders.unbind(dim=1):  # (B,)
            if config.minibatch_size:
                yield from self.take(order).split(config.minibatch_size)
            else:
                yield self

    @property
    def blanks(self):
        """How many this batch has, on all processes: a scalar, at least 1."""
        return gather(self.fills.mask).sum().clamp(min=1)


def in_batches(model, tokens, size):
    """The model's output for all inputs, `size` of them at a time."""
    return torch.cat([model(part) for part in tokens.split(size)])


def draw_uniforms(B, G, T, seed):
    """(B,G,T) float32 in [0,1), a function of `seed` alone, the same on every device."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.random((B, G, T), dtype=np.float32))


def to_fill(tokens, mask, mask_id, G, seed):
    """tokens (B,T), mask (B,T) -> `Inputs`, on the CPU, with the numbers of G fills of each."""
    shape = (len(mask), G, mask.shape[1])
    masked = tokens.masked_fill(mask, mask_id)  # (B,T)
    uniforms = draw_uniforms(*shape, (*seed, 1))  # (B,G,T)
    z_uniforms = draw_uniforms(*shape, (*seed, 3))  # (B,G,T)
    return Inputs(tokens, mask, masked, uniforms, z_uniforms)


def draw_orders(passes, B, seed):
    """(B,passes): all inputs in a random order for each pass, a function of `seed` alone."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(B) for _ in range(passes)]
    return torch.from_numpy(np.stack(orders, axis=1))


def draw_inputs(dataset, config, step, device):
    """This process's share of a step's inputs: the whole step's are drawn, from the seed."""
    size = config.batch_size * config.gradient_accumulation_steps * world()[0]
    masking = parse_masking(config.masking)
    seed = (config.seed, step)
    tokens, mask = dataset.batch(
        size, config.block_size, masking, config.mask_ratio, config.hidden_words, (*seed, 0)
    )  # (B,T), (B,T)
    whole = to_fill(tokens, mask, dataset.mask_id, config.group_size, seed)
    inputs = Inputs(*map(share, whole[:5]))
    orders = draw_orders(config.num_iterations, len(inputs.mask), (*seed, 2))  # (B,E)
    return Inputs(*(x.to(device) for x in inputs._replace(orders=orders)))
