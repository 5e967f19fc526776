"""The inputs of one step, what was filled into them, and the batches its updates take from that.

Letters: B inputs, T characters of each, G completions of each input, V characters of vocabulary.
A generator may have a latent of K values, a coin that all blanks of a completion see: it gives K
sets of logits for an input. A *row* is an input as one value of the latent sees it, R = B·K of
them, the rows of one input side by side; each fills g = G/K of the completions. Without a latent K
is 1, and rows are inputs.
"""

from dataclasses import dataclass

import numpy as np
import torch

from data.masking import parse_masking
from grpo import kernel, sampling
from grpo.plumbing.distributed import share, world
from grpo.plumbing.setup import forward
from grpo.sampling import penalise
from grpo.stats import log_softmax, marginal_kl, restrict, stats, where_blank


@dataclass
class Inputs:
    """Text with blanks, and the random numbers that will fill them: a function of (seed, step)."""

    tokens: torch.Tensor  # (B,T) the text
    mask: torch.Tensor  # (B,T) bool, True at a blank
    masked: torch.Tensor  # (B,T) the text, its blanks replaced by the mask token
    uniforms: torch.Tensor  # (B,G,T) float32 in [0,1): each decides one draw
    orders: torch.Tensor  # (E,B) in which each of E passes takes the inputs, in mini-batches

    def rows(self, n_latent):
        """-> masked (R,T), mask (R,T), uniforms (R,g,T)."""
        masked = self.masked.repeat_interleave(n_latent, dim=0)  # (R,T)
        mask = self.mask.repeat_interleave(n_latent, dim=0)  # (R,T)
        uniforms = self.uniforms.view(len(mask), -1, mask.shape[1])  # (R,g,T)
        return masked, mask, uniforms


@dataclass
class Rollout:
    """Completions as they were drawn and scored. Nothing of this changes while the policy does."""

    masked: torch.Tensor  # (B,T)
    mask: torch.Tensor  # (R,T) bool
    completions: torch.Tensor  # (R,g,T)
    kept: torch.Tensor  # (R,T,V) bool, the characters that could be drawn
    ref_logits: torch.Tensor  # (R,T,V)
    old_logp: torch.Tensor  # (R,g,T) log-probability when drawn
    credits: torch.Tensor  # (R,g,1) or (R,g,T) the reward of each blank, for the log alone
    advantages: torch.Tensor  # as credits
    learning: torch.Tensor  # (R,T) bool, the blanks that carry policy gradient

    def take(self, index):
        """Some of the inputs, with all their rows: a slice, or their numbers in any order."""
        B = len(self.masked)
        taken = {}
        for name, x in vars(self).items():
            by_input = x.unflatten(0, (B, -1))  # (B,K,...), of `masked` (B,1,T)
            taken[name] = by_input[index].flatten(0, 1)
        return Rollout(**taken)

    def split(self, size):
        """Batches of `size` inputs, in order."""
        return [self.take(slice(i, i + size)) for i in range(0, len(self.masked), size)]

    def updates(self, config, orders):
        """A batch for each optimizer step: num_iterations passes, whole or in shuffled parts."""
        for i in range(config.num_iterations):
            if config.minibatch_size:
                yield from self.take(orders[i]).split(config.minibatch_size)
            else:
                yield self


def operations(config, n_latent):
    """-> `sample_completions`, `stats`: their PyTorch definitions, or the fused CUDA kernel."""
    sample_completions = sampling.sample_completions
    compute_stats = stats
    if config.kernel == "cuda":
        sample_completions = kernel.sample_completions
        compute_stats = kernel.stats
    if config.kl_of == "row":
        return sample_completions, compute_stats

    def stats_of_mixture(logits, ref_logits, completions, kept, mask, temperature):
        """`stats`, with the KL of the mixture's marginals in the place of each row's own."""
        of_rows = compute_stats(logits, ref_logits, completions, kept, mask, temperature)
        kl = marginal_kl(logits, ref_logits, mask, n_latent, temperature)  # (R,T)
        return of_rows._replace(kl=kl)

    return sample_completions, stats_of_mixture


def as_policy(model, device, config):
    """A generator as it is sampled: tokens (B,T) -> logits (R,T,V)."""
    logits_of = forward(model, device, config)
    if config.repetition_penalty == 1:
        return logits_of
    return lambda tokens: penalise(logits_of(tokens), tokens, config.repetition_penalty)


def in_batches(model, tokens, size):
    """The model's output for all inputs, `size` of them at a time."""
    return torch.cat([model(part) for part in tokens.split(size)])


def draw_uniforms(inputs, group_size, length, seed):
    """(inputs,G,T) float32 in [0,1), a function of `seed` alone, the same on every device."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.random((inputs, group_size, length), dtype=np.float32))


def draw_orders(passes, inputs, seed):
    """(passes,inputs): all inputs in a random order for each pass, a function of `seed` alone."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([rng.permutation(inputs) for _ in range(passes)]))


def draw_inputs(dataset, config, step, to_device):
    """This process's share of a step's inputs: the whole step's are drawn, from the seed."""
    size = config.batch_size * config.gradient_accumulation_steps * world()[0]
    masking = parse_masking(config.masking)
    seed = (config.seed, step)
    tokens, mask = dataset.batch(
        size, config.block_size, masking, config.mask_ratio, config.hidden_words, (*seed, 0)
    )  # (B,T), (B,T)
    uniforms = draw_uniforms(size, config.group_size, config.block_size, (*seed, 1))  # (B,G,T)
    tokens = to_device(share(tokens))
    mask = to_device(share(mask))
    masked = tokens.masked_fill(mask, dataset.mask_id)  # (B,T)
    orders = to_device(draw_orders(config.num_iterations, len(tokens), (*seed, 2)))  # (E,B)
    return Inputs(tokens, mask, masked, to_device(share(uniforms)), orders)


def probability_of_equal_fills(logits, kept, inputs, temperature):
    """P(all G fills of an input are equal), before anything is scored: -> (B,).

    Π over blanks of Σ_v Π_z q_z(v)^g. Equal fills have equal rewards: its mean over inputs is
    a lower bound of the expected share of groups that teach nothing. A metric: such groups are not
    skipped, that would bias the gradient.
    """
    B, G, _ = inputs.uniforms.shape
    log_q = restrict(log_softmax(logits, temperature), kept)  # (R,T,V)
    g = G * B // len(log_q)
    all_draw_v = g * log_q.unflatten(0, (B, -1)).sum(dim=1)  # (B,T,V)
    all_equal = all_draw_v.logsumexp(dim=-1)  # (B,T)
    return where_blank(all_equal, inputs.mask).sum(dim=-1).exp()
