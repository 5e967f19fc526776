"""The pencil step: two blanks, four words, and the program's own `grpo_step`.

    python -m grpo.tools.toy [config.py ...] [--key=value ...]

This is `h_l_` from the lesson. There's no network, only a table of logits that plain gradient
descent moves, so learning_rate is its step size. The first step draws each of the four words once,
as the pencil does, and later steps draw at random. But the probabilities, reward, KL and entropy
that we print are exact, because four words are few enough to sum over.

All settings that `grpo_step` reads work here, and learning_rate, grad_clip, max_iters and seed.
The others do nothing.

Shapes: T characters, V vocabulary, G completions, B = 1 input.
"""

import torch

from data.user_mistake import run_program
from data.vocabulary import VOCABULARY, decode, encode
from grpo.batch import make_batch
from grpo.metrics import update_metrics
from grpo.optimizer import Optimizer
from grpo.policy import Product, Sample
from grpo.reward import Rewards
from grpo.run.config import load_config
from grpo.truncation import truncates
from model.transformer import IMPOSSIBLE
from train_grpo import grpo_step

WORDS = {"help": 2.0, "half": 0.8, "helf": -1.6, "halp": -2.2}  # and what they earn
FOUR = torch.stack([encode(word) for word in WORDS])[None]  # (1,4,T)
MASK = torch.tensor([[False, True, False, True]])  # (1,T)
# (4,2) in place of random numbers: with those of row i the sampler draws word i
IN_TURN = torch.tensor([[0.9, 0.9], [0.1, 0.1], [0.9, 0.1], [0.1, 0.9]])
DEFAULTS = "--group_size=4 --num_iterations=1 --kl_beta=0.4 --learning_rate=4 --grad_clip=0"
DEFAULTS += " --max_iters=100"


def reward(completions, batch):
    """Look up what each word earns: (1,G,T) -> (1,G)."""
    return torch.tensor([[WORDS[word] for word in decode(completions)]])


def train(arguments: list[str] = ()) -> list[dict[str, float]]:
    """Train the table. Returns its numbers before the first step, then after each step."""
    config = load_config([*DEFAULTS.split(), *arguments])
    base = torch.full((1, 4, len(VOCABULARY)), IMPOSSIBLE)  # (1,T,V)
    base[:, range(4), FOUR] = 0  # each blank has two letters, equally likely
    table = base.double().requires_grad_()  # (1,T,V)

    def policy(masked):
        return Product(table, masked, MASK, config, truncates=truncates(config))

    def reference(masked):
        return Product(base, masked, MASK, config)

    rewards = Rewards({"words": (reward, 1)})
    optimizer = Optimizer(torch.optim.SGD([table], config.learning_rate), config.grad_clip)
    rows, metrics = [], {}
    for step in range(config.max_iters + 1):  # the last step is never looked at
        seed = (config.seed, step)
        batch = make_batch(FOUR[:, 0], MASK, config.group_size, seed, config.num_iterations)
        with torch.no_grad():
            q, q_ref = policy(batch.masked), reference(batch.masked)
            exact = q.log_probs(Sample(FOUR), q_ref)
        p = exact.logp[0].sum(dim=-1).exp()  # (4,)
        row = dict(zip(WORDS, p.tolist()))
        row["reward"] = sum(row[word] * WORDS[word] for word in WORDS)
        row |= {"kl": exact.kl.sum().item(), "entropy": exact.entropy.sum().item()}
        rows.append(row | metrics)
        if step == 0:
            batch.uniforms[:, :, MASK[0]] = IN_TURN[torch.arange(config.group_size) % 4]
        _, *updates = grpo_step(policy, reference, rewards, optimizer, batch, config)
        figures = update_metrics(*updates)
        metrics = {name: float(figures[name]) for name in ("loss", "clip_ratio")}
    return rows


def main(arguments: list[str]) -> None:
    rows = train(arguments)
    print("step", *(f"{name[:8]:>8}" for name in rows[-1]))
    last = len(rows) - 1
    for step in sorted({1, min(10, last), last}):
        print(f"{step:4}", *(f"{x:z8.3f}" for x in rows[step].values()))  # z: no -0.000


if __name__ == "__main__":
    run_program(main, __doc__)
