"""The smallest case: `h_l_`, two blanks, four completions, and what GRPO does to them.

    python -m grpo.tools.toy

A model that believes in `half` and `help` gives the first blank a or e, half and half, and the
second f or p. The policy here is a table of logits, trained by train_grpo.py's own `grpo_step`.

Letters: T characters, V vocabulary, G completions, B = 1 input.
"""

import torch

from data.words import decode
from grpo.logprobs import log_softmax
from grpo.optimizer import Optimizer
from grpo.plumbing.config import Config
from grpo.reward import Rewards
from grpo.rollout import Inputs, draw_orders, draw_uniforms
from train_grpo import grpo_step

VOCABULARY = "aefhlp_"
WORDS = {"help": 0.8, "half": 0.8, "helf": 0.1, "halp": 0.1}  # the judge likes both words equally
COMPLETIONS = torch.tensor([[VOCABULARY.index(c) for c in word] for word in WORDS])  # (4,T)
MASK = torch.tensor([[False, True, False, True]])  # (1,T)
MASKED = COMPLETIONS[:1].masked_fill(MASK, VOCABULARY.index("_"))  # (1,T)
T = 4


class Table(torch.nn.Module):
    """A policy without a network: the same logits (1,T,V) whatever the input."""

    def __init__(self):
        super().__init__()
        logits = torch.full((1, T, len(VOCABULARY)), float("-inf"))
        logits[:, range(T), COMPLETIONS] = 0  # a or e, f or p
        self.logits = torch.nn.Parameter(logits)

    def forward(self, tokens):
        return self.logits.expand(len(tokens), -1, -1)


def reward(completions, masked, mask, decode):
    """What WORDS says: (1,G)."""
    return torch.tensor([[WORDS[word] for word in decode(completions)]])


def train(seed=1, steps=150):
    """`steps` steps of GRPO from the table of ½s -> {word: its probability}."""
    config = Config(
        batch_size=1,
        group_size=8,
        learning_rate=0.1,
        kl_beta=0.2,
        kl_target=0.0,
        num_iterations=1,
        credit="input",
        scale_rewards="none",
        baseline="leave_one_out",
    )
    policy = Table()
    optimizer = Optimizer(policy, config)
    rewards = Rewards({"words": (reward, 1)}, lambda tokens: decode(tokens, VOCABULARY))
    for step in range(steps):
        uniforms = draw_uniforms(1, config.group_size, T, (seed, step))  # (1,G,T)
        inputs = Inputs(MASKED, MASK, MASKED, uniforms, draw_orders(1, 1, seed))
        grpo_step(policy, Table(), rewards, optimizer, inputs, config)
    log_p = log_softmax(policy.logits, config.temperature)[0]  # (T,V)
    p = log_p[range(T), COMPLETIONS].sum(dim=1).exp()  # (4,)
    return dict(zip(WORDS, p.tolist()))


def main():
    print(" " * 9 + "".join(f"{word:>8s}" for word in WORDS))
    for title, steps in {"before": 0, "committed": 150}.items():
        numbers = "".join(f"{p:8.3f}" for p in train(steps=steps).values())
        print(f"{title:9s}{numbers}")


if __name__ == "__main__":
    main()
