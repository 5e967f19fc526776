"""A bidirectional character transformer, with a head for the generator or the judge.

Shapes: B inputs, T characters, V vocabulary. The features have width C (n_embd), and each of H
attention heads has width D = C / H. A latent has K values.

The trunk has RMSNorm (1910.07467), rotary positions (2104.09864), a GELU MLP, and
scaled_dot_product_attention without a causal mask. It has no dropout, because GRPO must
differentiate the very policy that was sampled.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

IMPOSSIBLE = -1e9  # like -inf, but the difference of two is 0 and not NaN


@dataclass(frozen=True)
class TransformerConfig:
    vocab_size: int = 28
    block_size: int = 64  # longest input, in characters
    n_layer: int = 6
    n_head: int = 4
    n_embd: int = 128
    n_latent: int = 1  # K, how many values the latent can take; see grpo/latent.py
    blank: int = 27  # the token of a blank, which the generator never draws


def rotary_table(length, head_width):
    """Tabulate cos and sin of position · frequency, each (T,D/2): RoFormer (2104.09864), eq. 15."""
    frequency = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)  # (D/2,)
    angle = torch.outer(torch.arange(length), frequency)  # (T,D/2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turn each pair (x[i], x[i + D/2]) by its position's angle: (B,H,T,D) -> (B,H,T,D).

    If q and k are turned like this, q·k depends only on the difference of their positions.
    """
    a, b = x.chunk(2, dim=-1)  # each (B,H,T,D/2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.norm1 = nn.RMSNorm(C)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.attention_out = nn.Linear(C, C, bias=False)
        self.norm2 = nn.RMSNorm(C)
        self.mlp_in = nn.Linear(C, 4 * C, bias=False)
        self.mlp_out = nn.Linear(4 * C, C, bias=False)

    def attention(self, x, cos, sin, attended):
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)  # (B,T,3,H,D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B,H,T,D)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        # On a CPU the backward pass of attention is five times slower in bfloat16. `rotate` has
        # made q and k float32, and here we make v float32, too. On CUDA, autocast decides the type.
        v = v.to(cos.dtype) if x.is_cpu else v
        with torch.autocast("cpu", enabled=False):
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=attended)  # (B,H,T,D)
        return self.attention_out(heads.transpose(1, 2).reshape(B, T, C))

    def forward(self, x, cos, sin, attended=None):
        x = x + self.attention(self.norm1(x), cos, sin, attended)  # (B,T,C)
        hidden = F.gelu(self.mlp_in(self.norm2(x)))  # (B,T,4C)
        return x + self.mlp_out(hidden)  # (B,T,C)


class Trunk(nn.Module):
    """The transformer without a head, which turns tokens into features."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.recompute = False  # save memory: keep no activations for the backward pass
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd)
        cos, sin = rotary_table(config.block_size, config.n_embd // config.n_head)
        self.cos = nn.Buffer(cos, persistent=False)  # (T,D/2)
        self.sin = nn.Buffer(sin, persistent=False)  # (T,D/2)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Layers that write into the residual stream start smaller, as in GPT-2.
                writers = 2 * config.n_layer if name.endswith("_out.weight") else 1
                nn.init.normal_(weight, std=0.02 / writers**0.5)

    def forward(self, tokens, attended):
        """Map tokens (B,T) to features (B,T,C). `attended` comes from `attention_mask`."""
        T = tokens.shape[1]
        x = self.embedding(tokens.clamp(min=0))  # (B,T,C)
        for block in self.blocks:
            inputs = (x, self.cos[:T], self.sin[:T], attended)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x = block(*inputs)
        return self.norm(x)


def attention_mask(tokens):
    """Tell which tokens (B,T) aren't padding: -> (B,1,1,T), or None if all may be attended to.

    Attention is faster without a mask. But a GPU would have to wait until we know whether there's
    padding, which is slower still.
    """
    if not tokens.is_cpu or (tokens < 0).any():
        return (tokens >= 0)[:, None, None]
    return None


class Generator(nn.Module):
    """The policy's network, which says what might stand at each position."""

    def __init__(self, config):
        super().__init__()
        self.trunk = Trunk(config)
        self.vocab_size = config.vocab_size
        self.n_latent = config.n_latent
        self.blank = config.blank
        characters = config.vocab_size - 1  # all but the blank
        self.head = nn.Linear(config.n_embd, config.n_latent * characters, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens):
        """Map masked inputs (B,T) to logits (B,T,V)."""
        return self.with_blank(self.head(self.trunk(tokens, attention_mask(tokens))))

    def with_blank(self, logits):
        """Insert the logit of the blank, which can never be drawn: (...,V-1) -> (...,V)."""
        impossible = torch.full_like(logits[..., :1], IMPOSSIBLE)  # (...,1)
        before, behind = logits[..., : self.blank], logits[..., self.blank :]
        return torch.cat([before, impossible, behind], dim=-1)


class LatentGenerator(Generator):
    """A generator that draws a latent z before the characters (grpo/latent.py)."""

    def __init__(self, config):
        super().__init__(config)
        self.prior = nn.Linear(config.n_embd, config.n_latent)
        nn.init.normal_(self.prior.weight, std=0.02)
        nn.init.zeros_(self.prior.bias)

    def forward(self, tokens):
        """Map masked inputs (B,T) to the logits of z (B,K), and of the characters (B,T,K,V).

        The logits of z come from the mean of the features over the blanks.
        """
        features = self.trunk(tokens, attention_mask(tokens))  # (B,T,C)
        blank = (tokens == self.blank)[..., None]  # (B,T,1)
        mean = (features * blank).sum(dim=1) / blank.sum(dim=1).clamp(min=1)  # (B,C)
        characters = self.head(features).unflatten(-1, (self.n_latent, -1))  # (B,T,K,V-1)
        return self.prior(mean).float(), self.with_blank(characters.float())


def make_generator(config: TransformerConfig) -> Generator:
    """Make a generator with random weights, with a latent if config.n_latent says so."""
    return LatentGenerator(config) if config.n_latent > 1 else Generator(config)


class Judge(nn.Module):
    """The reward model, which says whether a character stood in the text or was filled in."""

    def __init__(self, config):
        super().__init__()
        self.trunk = Trunk(config)
        self.head = nn.Linear(config.n_embd, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens):
        """Map filled texts (B,T) to logits (B,T), whose mean over the blanks is the score."""
        return self.head(self.trunk(tokens, attention_mask(tokens))).squeeze(-1)
