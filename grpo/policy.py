"""The policy: a distribution over fills, which draws them, scores them, and has its gradient.

    q(y) = Π_t q_t(y_t)

All blanks are independent, so a fill's probability is a product over its blanks. One forward pass
of the network gives the logits of every blank, and `Product` does the rest:

    sample(uniforms)           draws G fills of each input
    score(fills, reference)    computes their log-probabilities, and the exact KL and entropy
    logprobs_backward          is the gradient of these scores, written by hand

For one blank, let s be the logits, τ the temperature, y the character that was drawn, and S the set
of the characters that may be drawn. S is the whole vocabulary, unless a truncation leaves some out
(grpo/truncation.py):

    q = softmax(s / τ)                     over the whole vocabulary
    q_ref = softmax(s_ref / τ)             from the reference's logits s_ref
    q_S = q restricted to S, renormalised  what the characters are drawn from

    logp = log q_S(y)    KL = Σ_v q(v) (log q(v) − log q_ref(v))    H = −Σ_v q(v) log q(v)

All are in nats. GRPO (2402.03300, equation 4) estimates this KL from the drawn character. We sum
over all characters. We wrote the gradient out by hand for two reasons: you can read what GRPO does
to each logit, and the fused kernel has to compute the same. tests/algorithm/test_logprobs.py
compares it with autograd's.

Shapes: B masked inputs, T characters, G completions of each input, V vocabulary. A function that
takes any number of completions calls this number n.
"""

from dataclasses import dataclass, replace

import torch

from grpo.batch import Batch, Rows
from grpo.truncation import TRUNCATIONS, UNIT

SCALE = 1 << 21  # the largest weight


@dataclass(frozen=True)
class Fills(Rows):
    """Hold the completions, and the set S of characters that each blank was drawn from.

    An update uses the same S when it computes the log-probabilities of the completions.
    """

    completions: torch.Tensor  # (B,G,T) the filled-in copies of each input
    kept: torch.Tensor  # (B,T,V), or (B,T,K,V) with a latent: True for the characters in S


@dataclass(frozen=True)
class Scores(Rows):
    """A policy's scores of fills, in nats. All are 0 where there is no blank."""

    logp: torch.Tensor  # (B,G,T) log q_S(y), under the policy
    ref_logp: torch.Tensor  # (B,G,T) the same under the reference
    kl: torch.Tensor  # (B,T)
    entropy: torch.Tensor  # (B,T)


class Distribution(Rows):
    """A distribution over the fills of B inputs. Indexing it gives that of some of the inputs."""

    def at(self, temperature):
        """Return this distribution at another temperature."""
        return replace(self, config=replace(self.config, temperature=temperature))


@dataclass(frozen=True)
class Product(Distribution):
    """A distribution whose blanks are independent, which can draw fills and score them."""

    logits: torch.Tensor  # (B,T,V)
    batch: Batch
    config: object  # temperature and truncation

    def sample(self, uniforms):
        """Fill every blank G times, in parallel: uniforms (B,G,T,2) in [0,1) -> `Fills`."""
        completions, kept = sample_completions(
            self.logits, self.batch.masked, self.batch.mask, uniforms, self.config
        )
        return Fills(completions, kept)

    def score(self, fills, reference):
        """Score fills under the policy and a reference: -> `Scores`. Gradients reach the policy.

        All scores use the temperature of the draws. logp and ref_logp are renormalised over the
        characters in `fills.kept`. kl and entropy are exact, over the whole vocabulary.
        """
        y, kept, mask = fills.completions, fills.kept, self.batch.mask
        temperature = self.config.temperature
        scores = compute_logprobs(self.logits, reference.logits, y, kept, mask, temperature)
        return Scores(*scores)

    def log_prob(self, completions):
        """Compute each letter's exact log-probability, without truncation: (B,n,T) -> (B,n,T).

        The unit is nats. Visible text gets 0, so the sum over T is the log-probability of all
        blanks of a completion.
        """
        log_q = log_softmax(self.logits, self.config.temperature)  # (B,T,V)
        y = draws_by_position(completions, self.batch.mask)  # (B,T,n)
        letters = log_q.gather(-1, y).transpose(1, 2)  # (B,n,T)
        return torch.where(self.batch.mask[:, None], letters, 0)

    def best_guess(self):
        """Fill each blank with its likeliest character: -> (B,T)."""
        return torch.where(self.batch.mask, self.logits.argmax(dim=-1), self.batch.masked)

    def marginal(self):
        """Return this policy itself, because its blanks are already independent."""
        return self


# Drawing. We compute S and the draws with whole numbers. A character's weight is its probability
# divided by the likeliest character's, in units of 2^-21, rounded to a whole number. The sum of
# whole numbers does not depend on the order of adding them. So two implementations that agree on
# the weights also agree on S and on every draw, bit for bit. What has the weight 0 is never drawn.


def integer_weights(logits, temperature):
    """Turn logits into whole numbers, the weights: (...,V) -> (...,V) int64.

    A weight is round(exp((logit − largest logit) / temperature) · 2^21). A logit of -inf gives 0,
    and a NaN makes all weights of its blank 0. We compute in float64. In float32 two
    implementations of exp often differ enough that a weight rounds to another whole number.
    """
    x = logits.double()
    below_best = x - x.amax(dim=-1, keepdim=True)  # (...,V)
    relative = (below_best * (1 / temperature)).exp()  # (...,V) 1 for the likeliest
    return relative.nan_to_num(0).mul(SCALE).round().long()


def may_be_drawn(weights, uniforms, config):
    """Find the set S of the characters that may be drawn: weights (...,V) -> (...,V) bool.

    By default S is the whole vocabulary. Each truncation whose setting is on leaves some out. If
    any is on, characters of weight 0 are left out, too. uniforms (...,n) are all random numbers of
    a blank, for a truncation that tosses a coin.
    """
    settings = TRUNCATIONS.items()
    active = [truncate for name, (off, truncate) in settings if getattr(config, name) != off]
    kept = weights > 0 if active else torch.ones_like(weights, dtype=torch.bool)
    for truncate in active:
        kept = truncate(weights, kept, uniforms, config)
    return kept


def draw(weights, uniforms):
    """Draw by inverting the cumulative sum: weights (...,V), uniforms (...,G) -> (...,G) int64."""
    cumulative = weights.cumsum(dim=-1)  # (...,V)
    total = cumulative[..., -1:]  # (...,1)
    whole = (uniforms * UNIT).long()  # (...,G)
    target = whole * total // UNIT  # (...,G) in [0, total)
    return torch.searchsorted(cumulative, target, right=True)


def sample_completions(logits, masked, mask, uniforms, config):
    """Fill every blank of each input G times, in parallel, from one set of logits.

    logits (B,T,V), masked (B,T), mask (B,T) bool, uniforms (B,G,T,2) in [0,1)
    -> completions (B,G,T) int64, kept (B,T,V) bool

    kept is True for the characters in S, and all False at visible text.
    """
    of_blank = uniforms.transpose(1, 2)  # (B,T,G,2)
    weights = integer_weights(logits, config.temperature)  # (B,T,V)
    kept = may_be_drawn(weights, of_blank.flatten(2), config) & mask[..., None]  # (B,T,V)
    draws = draw(weights * kept, of_blank[..., 0].contiguous()).transpose(1, 2)  # (B,G,T)
    # Visible text stays, and so does a blank whose logits are NaN, because its weights are all 0.
    drawable = (weights * kept).any(dim=-1)[:, None]  # (B,1,T)
    return torch.where(drawable, draws, masked[:, None]), kept


# Scoring, and its gradient.


def log_softmax(logits, temperature):
    """Compute log q of each character, in float32 or better: (...,V) -> (...,V)."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(precise / temperature, dim=-1)


def restrict(log_probs, kept):
    """Renormalise log_probs (...,V) over the characters in `kept` (...,V). Others become -inf."""
    return torch.log_softmax(log_probs.masked_fill(~kept, float("-inf")), dim=-1)


def times(q, values):
    """Multiply q(v) by values(v), (...,V). Where q is 0, the result is 0 even if values is inf."""
    return torch.where(q == 0, 0, q * values)


def expectation(q, values):
    """Sum q(v) · values(v) over v: (...,V) -> (...,1)."""
    return times(q, values).sum(dim=-1, keepdim=True)


def draws_by_position(completions, mask):
    """Turn completions (B,G,T) into the draws of each blank (B,T,G), with 0 at visible text."""
    return torch.where(mask[:, None], completions, 0).transpose(1, 2)


def logprobs_forward(logits, ref_logits, completions, kept, mask, temperature):
    """Compute the four tensors of `Scores`, without a gradient: -> logp, ref_logp, kl, entropy.

    logits and ref_logits are (B,T,V), completions (B,G,T) and mask (B,T) bool. kept (B,T,V) bool is
    True for the characters in S.
    """
    log_q = log_softmax(logits, temperature)  # (B,T,V)
    log_q_ref = log_softmax(ref_logits, temperature)  # (B,T,V)

    y = draws_by_position(completions, mask)  # (B,T,G)
    logp = restrict(log_q, kept).gather(-1, y).transpose(1, 2)  # (B,G,T)  log q_S(y)
    ref_logp = restrict(log_q_ref, kept).gather(-1, y).transpose(1, 2)  # (B,G,T)

    q = log_q.exp()  # (B,T,V)
    kl = expectation(q, log_q - log_q_ref).squeeze(-1)  # (B,T)  Σ q (log q − log q_ref)
    entropy = -expectation(q, log_q).squeeze(-1)  # (B,T)  −Σ q log q
    of_draws = (torch.where(mask[:, None], x, 0) for x in (logp, ref_logp))
    of_blanks = (torch.where(mask, x, 0) for x in (kl, entropy))
    return *of_draws, *of_blanks


def logprobs_backward(gradients, logits, ref_logits, completions, kept, mask, temperature):
    """Compute the gradient of the loss with respect to logits (B,T,V).

    `gradients` holds g_logp (B,G,T), g_kl (B,T) and g_entropy (B,T), the loss's gradients with
    respect to logp, kl and entropy. The formula gives the gradient ds for one blank with logits s
    and drawn letters y_1 to y_G. The docstring of this file explains the other symbols.

    ds[v] = 1/τ · ( Σ_j g_logp[j] (1[v = y_j] − q_S[v])
                    + g_kl q[v] (log q[v] − log q_ref[v] − KL)
                    − g_entropy q[v] (log q[v] + H) )
    """
    g_logp, g_kl, g_entropy = gradients
    g_logp = g_logp.transpose(1, 2)  # (B,T,G)
    log_q = log_softmax(logits, temperature)  # (B,T,V)
    log_q_ref = log_softmax(ref_logits, temperature)  # (B,T,V)
    q = log_q.exp()  # (B,T,V)
    q_s = restrict(log_q, kept).exp()  # (B,T,V)
    y = draws_by_position(completions, mask)  # (B,T,G)

    drawn = torch.zeros_like(q).scatter_add(-1, y, g_logp)  # (B,T,V)  Σ_j g_logp[j] 1[v = y_j]
    d_logp = drawn - g_logp.sum(dim=-1, keepdim=True) * q_s  # (B,T,V)
    log_ratio = log_q - log_q_ref  # (B,T,V)
    d_kl = times(q, log_ratio - expectation(q, log_ratio))  # (B,T,V)
    d_entropy = -times(q, log_q - expectation(q, log_q))  # (B,T,V), since H = −Σ q log q
    d = d_logp + g_kl[..., None] * d_kl + g_entropy[..., None] * d_entropy  # (B,T,V)
    return torch.where(mask[..., None], d / temperature, 0).to(logits.dtype)


class LogProbsFunction(torch.autograd.Function):
    """Make autograd use `logprobs_backward` as the gradient of `logprobs_forward`.

    Only `logits` gets a gradient.
    """

    @staticmethod
    def forward(ctx, *inputs):
        ctx.temperature = inputs[-1]
        ctx.save_for_backward(*inputs[:-1])
        logp, ref_logp, kl, entropy = logprobs_forward(*inputs)
        ctx.mark_non_differentiable(ref_logp)
        return logp, ref_logp, kl, entropy

    @staticmethod
    def backward(ctx, g_logp, _, g_kl, g_entropy):
        gradients = (g_logp, g_kl, g_entropy)
        d = logprobs_backward(gradients, *ctx.saved_tensors, ctx.temperature)
        return d, None, None, None, None, None


compute_logprobs = LogProbsFunction.apply  # runs on any device
