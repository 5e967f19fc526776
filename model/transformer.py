"""One bidirectional character transformer, two heads.

Letters: B inputs, T characters, V vocabulary, C width (n_embd), H attention heads.
The trunk is RMSNorm (1910.07467), rotary positions (2104.09864), scaled_dot_product_attention without a causal mask and a
GELU MLP. There is no dropout anywhere: in GRPO the policy that is sampled must be the policy that is differentiated.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class TransformerConfig:
    vocab_size: int = 28  # the last token is the mask, `_`
    block_size: int = 64  # longest input, in characters
    n_layer: int = 6
    n_head: int = 4
    n_embd: int = 128
    n_latent: int = 1  # values of the latent z that all blanks of a completion see


def rotary_table(length, head_width):
    """cos and sin of position * frequency, each (T, head_width / 2): RoFormer (2104.09864), equation 15."""
    angle = torch.outer(
        torch.arange(length), 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    )
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turn each pair (x[i], x[i + half]) by its position's angle, so that q·k depends on the distance alone. (B,H,T,C/H)"""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, C = config.n_head, config.n_embd
        self.norm1 = nn.RMSNorm(C)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.attention_out = nn.Linear(C, C, bias=False)
        self.norm2 = nn.RMSNorm(C)
        self.mlp_in = nn.Linear(C, 4 * C, bias=False)
        self.mlp_out = nn.Linear(4 * C, C, bias=False)

    def forward(self, x, cos, sin, attended=None):
        B, T, C = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(B, T, 3, self.n_head, C // self.n_head)
            .permute(2, 0, 3, 1, 4)
        )  # each (B,H,T,C/H)
        with torch.autocast(
            "cpu", enabled=False
        ):  # on a CPU the backward pass of attention is five times slower in bfloat16
            heads = F.scaled_dot_product_attention(
                rotate(q, cos, sin), rotate(k, cos, sin), v.to(cos.dtype), attn_mask=attended
            )  # (B,H,T,C/H)
        x = x + self.attention_out(heads.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x)), approximate="tanh"))


class Trunk(nn.Module):
    padded = (
        False  # may some tokens be negative, that is, no characters? They are never attended to
    )
    checkpointing = (
        False  # forget each block's activations, compute them again in the backward pass
    )

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd)
        self.cos, self.sin = (
            nn.Buffer(table, persistent=False)
            for table in rotary_table(config.block_size, config.n_embd // config.n_head)
        )
        for name, weight in self.named_parameters():
            if (
                weight.dim() == 2
            ):  # layers that write into the residual stream start smaller, as in GPT-2
                nn.init.normal_(
                    weight,
                    std=0.02 / (2 * config.n_layer) ** 0.5
                    if name.endswith("_out.weight")
                    else 0.02,
                )

    def forward(self, tokens):
        """(B,T) tokens -> (B,T,C) features."""
        T = tokens.shape[1]
        assert T <= self.config.block_size, (
            f"input of {T} characters, at most {self.config.block_size}"
        )
        attended = (tokens >= 0)[:, None, None] if self.padded else None  # (B,1,1,T)
        x = self.embedding(tokens.clamp(min=0) if self.padded else tokens)  # (B,T,C)
        for block in self.blocks:
            arguments = x, self.cos[:T], self.sin[:T], attended
            x = (
                checkpoint(block, *arguments, use_reentrant=False)
                if self.checkpointing and torch.is_grad_enabled()
                else block(*arguments)
            )
        return self.norm(x)


class Generator(nn.Module):
    """The policy: what might stand at each position."""

    def __init__(self, config):
        super().__init__()
        self.trunk = Trunk(config)
        self.n_latent = config.n_latent
        self.head = nn.Linear(config.n_embd, config.n_latent * (config.vocab_size - 1), bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens):
        """Masked input (B,T) -> logits (B·K,T,V); row b·K + z is input b as value z of the latent sees it.

        The mask token's logit is -inf, so that no blank is ever filled with a blank.
        """
        logits = self.head(self.trunk(tokens))  # (B,T,K·(V-1))
        logits = logits.unflatten(-1, (self.n_latent, -1))  # (B,T,K,V-1)
        logits = logits.transpose(1, 2).flatten(0, 1)  # (B·K,T,V-1)
        return F.pad(logits, (0, 1), value=float("-inf"))  # (B·K,T,V)


class Judge(nn.Module):
    """The reward model: is each character the one that stood there, or one that was filled in?"""

    def __init__(self, config):
        super().__init__()
        self.trunk = Trunk(config)
        self.head = nn.Linear(config.n_embd, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens):
        """Text without blanks (B,T) -> logits of P(real), one per character (B,T)."""
        return self.head(self.trunk(tokens)).squeeze(-1)
