"""The smallest case: `h_l_`, two blanks, four fills, and what GRPO does to them.

    python -m grpo.toy                       # prints the tables; --plot=FILE.png draws them

A model that believes in `half` and `help` gives the first blank a or e, half and half, and the
second f or p. The policy here is a table of logits, trained by train_grpo.py's own `grpo_step`.

Letters: T characters, V vocabulary, K values of the latent, G completions, B = 1 input.
"""

from pathlib import Path

import torch

from grpo.compare import new_figure
from grpo.optimizer import Optimizer
from grpo.plumbing.config import Config, Parser, exit_on_mistake
from grpo.plumbing.log import Clock
from grpo.rollout import Inputs, draw_uniforms
from train_grpo import grpo_step

VOCABULARY = "aefhlp_"
TEXT = "h_l_"
FILLS = ("ae", "fp")  # what each blank may be
WORDS = {"help": 0.8, "half": 0.8, "helf": 0.1, "halp": 0.1}  # the judge likes both words equally


class Table(torch.nn.Module):
    """A policy without a network: logits (K,T,V), the same whatever the input."""

    def __init__(self, n_latent):
        super().__init__()
        logits = torch.full((n_latent, len(TEXT), len(VOCABULARY)), float("-inf"))
        logits[..., 0] = 0  # where nothing is hidden, anything will do
        blanks = [t for t, c in enumerate(TEXT) if c == "_"]
        for t, letters in zip(blanks, FILLS):
            logits[:, t] = float("-inf")
            for letter in letters:
                logits[:, t, VOCABULARY.index(letter)] = 0
        self.logits = torch.nn.Parameter(logits)

    def forward(self, tokens):
        return self.logits * 1


class WordReward:
    """The setting `reward`, of one part: WORDS."""

    names = ("words",)

    def __call__(self, completions, masked, mask, credit):
        rewards = torch.zeros(completions.shape[:2])  # (B,G)
        for g, fill in enumerate(completions[0].tolist()):
            rewards[0, g] = WORDS["".join(VOCABULARY[c] for c in fill)]
        return rewards[..., None], rewards[..., None]

    def total(self, parts):
        return parts[..., 0]


def train(n_latent, seed, steps=150, **settings):
    """`steps` steps of GRPO from the table of ½s -> {word: its probability}."""
    config = Config(
        **{
            "group_size": 8,
            "batch_size": 1,
            "learning_rate": 0.1,
            "kl_beta": 0.2,
            "kl_target": 0.0,
            "num_iterations": 1,
            "credit": "input",
            "scale_rewards": "none",
            "baseline": "leave_one_out",
        }
        | settings
    )
    policy = Table(n_latent)
    reference = Table(n_latent)
    optimizer = Optimizer(policy, config)
    rewards = WordReward()
    clock = Clock(torch.device("cpu"))
    masked = torch.tensor([[VOCABULARY.index(c) for c in TEXT]])  # (1,T)
    mask = masked == VOCABULARY.index("_")  # (1,T)
    for step in range(steps):
        uniforms = draw_uniforms(1, config.group_size, len(TEXT), (seed, step))  # (1,G,T)
        inputs = Inputs(masked, mask, masked, uniforms, (seed, step))
        grpo_step(policy, reference, rewards, optimizer, inputs, config, clock)
    return word_probabilities(policy)


@torch.no_grad()
def word_probabilities(policy):
    """P(word) = 1/K Σ_z q_z(first blank) q_z(second blank)."""
    q = policy.logits.softmax(dim=-1)  # (K,T,V)
    found = {}
    for word in WORDS:
        product = torch.ones(len(q))  # (K,)
        for t, c in enumerate(word):
            if TEXT[t] == "_":
                product = product * q[:, t, VOCABULARY.index(c)]
        found[word] = product.mean().item()
    return found


CASES = {  # title: arguments of `train`
    "before": {"n_latent": 1, "steps": 0},
    "committed: no latent": {"n_latent": 1},
    "a coin: K = 2": {"n_latent": 2, "kl_of": "marginal"},
}


def plot(file, results):
    """The four fills as a 2 x 2 table of probabilities, one for each case."""
    figure = new_figure("plot", file, (9, 3))
    for axes, (title, found) in zip(figure.subplots(1, len(results)), results.items()):
        table = [[found["help"], found["helf"]], [found["halp"], found["half"]]]
        axes.imshow(table, vmin=0, vmax=1, cmap="Blues")
        axes.set_title(title)
        axes.set_xticks([0, 1], ["p", "f"])
        axes.set_yticks([0, 1], ["e", "a"])
        for row, words in enumerate((("help", "helf"), ("halp", "half"))):
            for column, word in enumerate(words):
                shade = "white" if found[word] > 0.6 else "black"
                label = f"{word}\n{found[word]:.2f}"
                axes.text(column, row, label, ha="center", va="center", color=shade)
    figure.savefig(file)


def main(argv=None):
    parser = Parser(prog="python -m grpo.toy", description="GRPO on h_l_, with a coin and without.")
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the tables; needs matplotlib")
    with exit_on_mistake("toy"):
        args = parser.parse_args(argv)
        results = {}
        print(f"{'':22s}" + "".join(f"{word:>8s}" for word in WORDS))
        for title, arguments in CASES.items():
            results[title] = train(seed=args.seed, **arguments)
            print(
                f"{title:22s}" + "".join(f"{p:8.3f}" for p in results[title].values()), flush=True
            )
        if args.plot:
            plot(Path(args.plot), results)


if __name__ == "__main__":
    main()
