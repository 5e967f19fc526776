"""The smallest case, README's `h_l_`: two blanks, four completions, and what GRPO does to them.

    python -m grpo.tools.toy

A model that believes in `help` and `half` gives the first blank e or a, half and half, and the
second p or f. The policy here is a table of logits, trained by train_grpo.py's own `grpo_step` and
plain gradient descent. In the first step each completion is drawn once, as in README's sums; from
there on by chance.

Letters: T characters, V vocabulary, G completions, B = 1 input.
"""

from dataclasses import replace

import torch

from data.words import decode
from grpo.batch import make_batch
from grpo.logprobs import log_softmax
from grpo.optimizer import Optimizer
from grpo.plumbing.config import Config
from grpo.product import Product
from grpo.reward import Rewards
from grpo.sampling import Sampling
from train_grpo import grpo_step

VOCABULARY = "aefhlp_"
WORDS = {"help": 2.0, "half": 0.8, "helf": -1.6, "halp": -2.2}  # the judge's log-odds
COMPLETIONS = torch.tensor([[VOCABULARY.index(c) for c in word] for word in WORDS])  # (4,T)
MASK = torch.tensor([[False, True, False, True]])  # (1,T)
EACH_ONCE = torch.tensor([[0.7, 0.7], [0.2, 0.2], [0.7, 0.2], [0.2, 0.7]])  # (G,blanks) uniforms
T = 4


class Table(torch.nn.Module):
    """A policy without a network: the same logits (1,T,V) whatever the input."""

    def __init__(self):
        super().__init__()
        logits = torch.full((1, T, len(VOCABULARY)), float("-inf"))
        logits[:, range(T), COMPLETIONS] = 0  # e or a, p or f
        self.logits = torch.nn.Parameter(logits)

    def forward(self, batch):
        return Product(self.logits.expand(len(batch.mask), -1, -1), batch, Sampling())


def reward(completions, batch, decode):
    """Look the words up in WORDS: (1,G)."""
    return torch.tensor([[WORDS[word] for word in decode(completions)]])


def train(steps, seed=1):
    """`steps` steps of GRPO from the table of ½s -> {word: its probability}."""
    config = Config(batch_size=1, group_size=4, num_iterations=1, grad_clip=0)
    policy = Table()
    optimizer = Optimizer(policy, config)
    optimizer.adamw = torch.optim.SGD(policy.parameters(), lr=4)
    rewards = Rewards({"words": (reward, 1)}, lambda tokens: decode(tokens, VOCABULARY))
    for step in range(steps):
        batch = make_batch(COMPLETIONS[:1], MASK, VOCABULARY.index("_"), 4, (seed, step))
        batch = replace(batch, words=MASK.long())  # one word, whose blanks are not adjacent
        if step == 0:
            batch.uniforms[:, :, MASK[0], 0] = EACH_ONCE
        grpo_step(policy, Table(), rewards, optimizer, batch, config)
    log_p = log_softmax(policy.logits, config.temperature)[0]  # (T,V)
    p = log_p[range(T), COMPLETIONS].sum(dim=1).exp()  # (4,)
    return dict(zip(WORDS, p.tolist()))


def main():
    print(" " * 9 + "".join(f"{word:>8s}" for word in WORDS))
    for steps in (0, 1, 10, 100):
        numbers = "".join(f"{p:8.3f}" for p in train(steps).values())
        print(f"step {steps:<4d}{numbers}")


if __name__ == "__main__":
    main()
