"""The policy: one forward pass, and you have a distribution over completions.

    q(y) = Π_t q_t(y_t),    q_t = softmax(s_t / τ)

All blanks are independent, so the probability of a completion is a product over its blanks. The
network turns a masked input into the logits s of every blank, and `Product` does the rest:

    q.sample(batch)             draws G completions of each input, all blanks at once
    q.log_probs(sample, q_ref)  computes their log-probabilities, and the exact KL and entropy
    q.log_likelihood(y)         computes log q of any completions
    q.best_guess()              fills each blank with its most likely character

`logprobs_backward` is the gradient of log_probs, by hand.

For one blank with logits s, temperature τ and drawn character y, in nats:

    q = softmax(s / τ)    q_ref = softmax(s_ref / τ)
    logp = log q(y)       KL = Σ_v q(v)·(log q(v) − log q_ref(v))       H = −Σ_v q(v)·log q(v)

GRPO estimates this KL from the drawn character (2402.03300, eq. 4). One step is enough to fill
everything here, so we can afford the sum over all characters. The gradient is by hand for two
reasons: you can see what GRPO does to each logit, and the CUDA kernel has to do the same.

A *generator* is a network. A *policy* is a generator called as a distribution, policy(masked) -> q,
and *the* policy is the one that learns. The *base* is what it was before GRPO, and the *reference*
what the KL compares it with. To *sample* is to fill all blanks from q at once, with *uniforms*,
random numbers that were made with the batch.

Shapes: B masked inputs, T characters, G completions of each input, V vocabulary. A function that
takes any number of completions calls that number n.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo.batch import Batch, Rows
from grpo.truncation import allowed_characters, penalize_repetition, restrict


@dataclass(frozen=True)
class Sample(Rows):
    """The completions of a step, and what they were allowed to be drawn from."""

    completions: Tensor  # (B,G,T) the filled-in copies of each input
    allowed: Tensor | None = None  # (B,T,V) bool if a truncation is on (grpo/truncation.py)


@dataclass(frozen=True)
class LogProbs(Rows):
    """How likely a policy finds a sample, in nats. All are 0 where there's no blank."""

    logp: Tensor  # (B,G,T) log q(y)
    ref_logp: Tensor  # (B,G,T) log q_ref(y)
    kl: Tensor  # (B,T) KL(q‖q_ref)
    entropy: Tensor  # (B,T)


def pick(q: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from the last dimension: q (...,V) in float64, uniforms (...) in [0,1) -> (...).

    We invert the cumulative sum: each character owns a piece of [0,1), whose length is its
    probability.
    """
    ends = q.cumsum(dim=-1)  # (...,V) where the pieces end
    y = (ends <= uniforms[..., None]).sum(dim=-1)
    return y.clamp(max=q.shape[-1] - 1)  # the last piece may end a rounding error before 1


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Compute log q of each character, in float32 or better: (...,V) -> (...,V)."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(precise / temperature, dim=-1)


def logprobs_backward(
    g_logp: Tensor,  # (B,G,T) the loss's gradient with respect to logp
    g_kl: Tensor,  # (B,T) to kl
    g_entropy: Tensor,  # (B,T) to entropy
    logits: Tensor,
    ref_logits: Tensor,
    completions: Tensor,
    mask: Tensor,
    temperature: float,
) -> Tensor:  # (B,T,V)
    """Compute the loss's gradient with respect to the logits.

    For one blank with logits s and draws y_1 to y_G:

    ds[v] = 1/τ · ( Σ_j g_logp[j]·(1[v = y_j] − q[v])
                    + g_kl·q[v]·(log q[v] − log q_ref[v] − KL)
                    − g_entropy·q[v]·(log q[v] + H) )
    """
    log_q = log_softmax(logits, temperature)  # (B,T,V)
    log_q_ref = log_softmax(ref_logits, temperature)  # (B,T,V)
    q = log_q.exp()  # (B,T,V)
    y = completions.clamp(min=0).mT  # (B,T,G) padding is -1
    g_logp = g_logp.mT  # (B,T,G)

    drawn = torch.zeros_like(q).scatter_add(-1, y, g_logp)  # (B,T,V)  Σ_j g_logp[j]·1[v = y_j]
    d_logp = drawn - g_logp.sum(dim=-1, keepdim=True) * q  # (B,T,V)
    log_ratio = log_q - log_q_ref  # (B,T,V)
    kl = (q * log_ratio).sum(dim=-1, keepdim=True)  # (B,T,1)
    d_kl = q * (log_ratio - kl)  # (B,T,V)
    entropy = -(q * log_q).sum(dim=-1, keepdim=True)  # (B,T,1)
    d_entropy = -q * (log_q + entropy)  # (B,T,V)
    d = d_logp + g_kl[..., None] * d_kl + g_entropy[..., None] * d_entropy  # (B,T,V)
    return torch.where(mask[..., None], d / temperature, 0).to(logits.dtype)


class ComputeLogProbs(torch.autograd.Function):
    """Compute log q of the completions, KL and entropy. `logprobs_backward` is its gradient."""

    @staticmethod
    def forward(ctx, logits, ref_logits, completions, mask, temperature):
        """Return logp, ref_logp (B,G,T), kl, entropy (B,T), of logits and ref_logits (B,T,V)."""
        ctx.temperature = temperature
        ctx.save_for_backward(logits, ref_logits, completions, mask)
        log_q = log_softmax(logits, temperature)  # (B,T,V)
        log_q_ref = log_softmax(ref_logits, temperature)  # (B,T,V)
        q = log_q.exp()  # (B,T,V)
        y = completions.clamp(min=0).mT  # (B,T,G) padding is -1

        logp = log_q.gather(-1, y).mT  # (B,G,T)
        ref_logp = log_q_ref.gather(-1, y).mT  # (B,G,T)
        kl = (q * (log_q - log_q_ref)).sum(dim=-1)  # (B,T)
        entropy = -(q * log_q).sum(dim=-1)  # (B,T)
        logp, ref_logp = (torch.where(mask[:, None], x, 0) for x in (logp, ref_logp))
        kl, entropy = (torch.where(mask, x, 0) for x in (kl, entropy))
        ctx.mark_non_differentiable(ref_logp)
        return logp, ref_logp, kl, entropy

    @staticmethod
    def backward(ctx, g_logp, _, g_kl, g_entropy):
        d = logprobs_backward(g_logp, g_kl, g_entropy, *ctx.saved_tensors, ctx.temperature)
        return d, None, None, None, None


@dataclass(frozen=True)
class Product(Rows):
    """Independent blanks. Indexing it gives the distribution of some of the inputs."""

    logits: Tensor  # (B,T,V)
    masked: Tensor  # (B,T) the inputs
    mask: Tensor  # (B,T) bool, True at a blank
    config: object
    # on a GPU the kernel does this (grpo/kernel.py)
    compute_log_probs: Callable = ComputeLogProbs.apply
    truncates: bool = False  # draw from only some of the characters (grpo/truncation.py)

    def sample(self, batch: Batch) -> Sample:
        """Fill every blank G times in parallel, with the batch's random numbers."""
        logits, allowed = self.logits, None
        if self.truncates:
            allowed = allowed_characters(logits, batch.coins[..., None], self.config)  # (B,T,V)
            logits = restrict(logits, allowed)
        q = (logits.double() / self.config.temperature).softmax(dim=-1)[:, None]  # (B,1,T,V)
        y = pick(q, batch.uniforms)  # (B,G,T)
        return Sample(torch.where(self.mask[:, None], y, self.masked[:, None]), allowed)

    def log_probs(self, sample: Sample, reference: "Product") -> LogProbs:
        """Compute log q and log q_ref of a sample. Gradients reach this policy's logits.

        With a truncation, logp and ref_logp are of the characters that could be drawn. KL and
        entropy are of all characters: of the allowed ones they'd read 0 while the policy collapses.
        """
        rest = sample.completions, self.mask, self.config.temperature
        logits = self.logits, reference.logits
        logp, ref_logp, kl, entropy = self.compute_log_probs(*logits, *rest)
        if sample.allowed is not None:
            restricted = [restrict(each, sample.allowed) for each in logits]
            logp, ref_logp, _, _ = self.compute_log_probs(*restricted, *rest)
        return LogProbs(logp, ref_logp, kl, entropy)

    def log_likelihood(self, completions: Tensor) -> Tensor:
        """Compute log q of each character, without truncation: (B,n,T) -> (B,n,T).

        Visible text gets 0, so the sum over T is the log-probability of the completion.
        """
        log_q = self.log_marginals()  # (B,T,V)
        y = completions.clamp(min=0).mT  # (B,T,n) padding is -1
        return torch.where(self.mask[:, None], log_q.gather(-1, y).mT, 0)

    def log_marginals(self) -> Tensor:
        """Compute log q of every character at each position: -> (B,T,V)."""
        return log_softmax(self.logits, self.config.temperature)

    def best_guess(self) -> Tensor:
        """Fill each blank with its most likely character: -> (B,T)."""
        return torch.where(self.mask, self.logits.argmax(dim=-1), self.masked)


def at_temperature(q: Product, temperature: float) -> Product:
    """Return the same distribution at another temperature. It may be a `Latent`, too."""
    return replace(q, config=replace(q.config, temperature=temperature))


class Policy:
    """Call a network as a distribution: policy(masked) -> q. `policy.network` is what learns.

    The network sees each masked input once, batch_size inputs at a time. It may live on a different
    device from the inputs. `distribution` makes q from what it returns: a `Product` from logits, a
    `Latent` from the logits of z and of the characters. grpo/run/load.py chooses.
    """

    def __init__(self, network: torch.nn.Module, distribution: Callable, config, autocast):
        self.network = network
        self.device = next(network.parameters()).device
        self.distribution = distribution
        self.config = config
        self.autocast = autocast  # a context: to bfloat16, if that's the run's dtype

    def __call__(self, masked: Tensor) -> Product:
        parts = masked.to(self.device).split(self.config.batch_size)
        with self.autocast:
            outputs = [self.network(part) for part in parts]
        if isinstance(outputs[0], Tensor):  # only logits, so there's no latent
            outputs = [(logits,) for logits in outputs]
        *prior, logits = [torch.cat(each).to(masked.device) for each in zip(*outputs)]
        blank, penalty = self.network.blank, self.config.repetition_penalty
        if penalty != 1:
            logits = penalize_repetition(logits, masked, blank, penalty)
        return self.distribution(*prior, logits, masked, masked == blank, self.config)
