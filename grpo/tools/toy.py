"""Train the smallest case, README's `h_l_` with its two blanks, in a few seconds.

    python -m grpo.tools.toy [config.py ...] [--key=value ...] [--help]

If a model thinks that `help` and `half` are equally likely, it fills the first blank with e or a,
and the second with p or f, each with probability one half. Here the policy is a table of logits,
and not a network. train_grpo.py's own `grpo_step` trains it, with plain gradient descent. The first
step draws the four words in turn, as in README's example, and later steps draw at random. But the
probabilities, reward, KL and entropy that we print are exact, because we sum over all four words.

Shapes: T characters, V vocabulary, G completions, K values of a latent, B = 1 input.
"""

import sys
from dataclasses import dataclass

import torch

from data.user_mistake import Mistake, exit_on_mistake
from data.vocabulary import MASK_ID, VOCABULARY, decode, encode
from grpo.batch import make_batch
from grpo.optimizer import Optimizer, update_reference
from grpo.reward import Rewards
from grpo.run.config import Config, check, read_arguments
from grpo.run.network import make_policy
from model.transformer import IMPOSSIBLE
from train_grpo import grpo_step

WORDS = {"help": 2.0, "half": 0.8, "helf": -1.6, "halp": -2.2}  # the judge's log-odds
COMPLETIONS = torch.stack([encode(word) for word in WORDS])  # (4,T)
MASK = torch.tensor([[False, True, False, True]])  # (1,T)
# (4,2) These stand in for random numbers. Row i makes the sampler draw word i of WORDS.
IN_TURN = torch.tensor([[0.9, 0.9], [0.1, 0.1], [0.9, 0.1], [0.1, 0.9]])
T = 4
APART = 1.0  # initial logit of the letters that a value of the latent prefers
SHOWN = (0, 1, 2, 5, 10, 20, 50, 100)  # the steps that we print
LINE = "{:>4}" + "{:>6}" * 4 + "{:>8}{:>7}{:>8}{:>8}{:>7}{:>8}{:>6}"


@dataclass
class ToyConfig(Config):
    """The settings of a run that are about the method, and one more. The others do nothing here."""

    n_latent: int = 1  # how many values the latent can take, up to 4; 1: no latent


# These stand before the flags of the user, as those of a config file would. There is no AdamW here,
# so learning_rate is the step size of plain gradient descent.
DEFAULTS = [
    "--group_size=4",
    "--num_iterations=1",
    "--kl_beta=0.4",
    "--learning_rate=4",
    "--grad_clip=0",
    "--max_iters=100",
]


class Table(torch.nn.Module):
    """A generator without a network, whose logits are the same for every input."""

    def __init__(self, n_latent=1):
        super().__init__()
        self.n_latent = n_latent
        self.vocab_size = len(VOCABULARY)
        self.blank = MASK_ID
        logits = torch.full((1, T, n_latent, len(VOCABULARY)), IMPOSSIBLE, dtype=torch.float64)
        logits[:, range(T), :, COMPLETIONS] = 0  # each blank has two equally likely letters
        if n_latent > 1:  # if all z began with the same logits, they would stay the same
            for z in range(n_latent):
                logits[:, range(T), z, COMPLETIONS[z]] = APART
            self.prior = torch.nn.Parameter(logits.new_zeros(1, T, n_latent))  # (1,T,K)
        self.logits = torch.nn.Parameter(logits.squeeze(2))  # (1,T,V) or (1,T,K,V)

    def forward(self, tokens, words, **options):
        return tuple(self.parameters())


def reward(completions, batch):
    """Look up the reward of each completed word in WORDS: (1,G,T) -> (1,G)."""
    return torch.tensor([[WORDS[word] for word in decode(completions)]], dtype=torch.float64)


def draw_batch(step, config):
    """Make a batch of one input, h_l_, and draw the random numbers of a step: -> `Batch`."""
    seed = (config.seed, step)
    words = MASK.long()  # the two blanks are not adjacent, but they belong to one word
    batch = make_batch(COMPLETIONS[:1], MASK, words, config.group_size, seed)
    if step == 0:
        batch.uniforms[:, :, MASK[0]] = IN_TURN[torch.arange(config.group_size) % 4]
    return batch


def look(q, q_ref, **figures):
    """Return exact numbers about the distribution `q`, then `figures`: -> {name: number}.

    The exact numbers are the probabilities of the four words, the expected reward, the KL to
    `q_ref`, and the entropy. KL and entropy are those of the whole word, in nats.
    """
    log_p, log_p_ref = (each.log_prob(COMPLETIONS[None])[0].sum(dim=1) for each in (q, q_ref))
    p = log_p.exp()  # (4,)
    seen = dict(zip(WORDS, p))
    seen["reward"] = p @ p.new_tensor([*WORDS.values()])
    seen["kl"] = p @ (log_p - log_p_ref)
    seen["entropy"] = -p @ log_p
    return {name: x.item() for name, x in {**seen, **figures}.items()}


def settings_of(arguments):
    """Read config files and flags, which stand after DEFAULTS: -> `ToyConfig`."""
    usage = __doc__.splitlines()[2].strip()
    config = ToyConfig(**read_arguments(ToyConfig, [*DEFAULTS, *arguments], usage))
    if config.n_latent > len(WORDS):
        raise Mistake(f"n_latent={config.n_latent} is more than {len(WORDS)}; lower it")
    check(config)
    return config


def train(arguments=()):
    """Train a `Table`: -> a list of {name: number}, one before the first step, one after each step.

    `reward`, `kl`, `entropy` and the probabilities of the four words are exact. The other numbers
    describe the step that was just made: its `loss`, the largest `ratio` of a letter in any update,
    the share of letters that were `clipped`, and `grad`, the norm of the gradient.
    """
    config = settings_of(arguments)
    table, base = Table(config.n_latent), Table(config.n_latent)
    policy, reference = (make_policy(x, config, torch.device("cpu")) for x in (table, base))
    descent = torch.optim.SGD(table.parameters(), lr=config.learning_rate)
    optimizer = Optimizer(descent, config.grad_clip)
    rewards = Rewards({"words": (reward, 1)})

    def watched(batch):
        seen.append(policy(batch))
        return seen[-1]

    batch = draw_batch(0, config)
    rows = [look(policy(batch), reference(batch))]
    for step in range(config.max_iters):
        batch = draw_batch(step, config)
        seen = []  # `watched` puts the policy's distribution here, at the draw and each update
        rollout, metrics = grpo_step(watched, reference, rewards, optimizer, batch, config)
        update_reference(base, table, step + 1, config)
        log_ratios = [q.score(rollout.fills, q).logp - rollout.old.logp for q in seen]
        figures = {
            "loss": metrics["loss"],
            "ratio": max(x.max() for x in log_ratios).exp(),
            "clipped": metrics["clip_ratio"],
            "grad": metrics["grad_norm"],
        }
        rows.append(look(policy(batch), reference(batch), **figures))
    return rows


def main(arguments):
    torch.set_num_threads(1)  # a second thread would only wait
    with exit_on_mistake("grpo.tools.toy"):
        rows = train(arguments)
        print(LINE.format("step", *rows[-1]))
        for step, row in enumerate(rows):
            if step in SHOWN or row is rows[-1]:
                numbers = (f"{x:z.3f}" for x in row.values())  # z turns -0.000 into 0.000
                print(LINE.format(step, *numbers, *"----"))


if __name__ == "__main__":
    main(sys.argv[1:])
