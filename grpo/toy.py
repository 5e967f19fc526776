"""The smallest case: `h_l_`, two blanks, four fills, and what GRPO does to them.

    python -m grpo.toy                       # prints the tables; --plot=FILE.png draws them

A model that believes in `half` and `help` gives the first blank a or e, half and half, and the
second f or p. The policy here is a table of logits, trained by train_grpo.py's own `grpo_step`.

Letters: T characters, V vocabulary, K values of the latent, G completions, B = 1 input.
"""

import torch

from grpo.compare import new_figure
from grpo.mixture import log_prob
from grpo.optimizer import Optimizer
from grpo.plumbing.config import Config, Parser, exit_on_mistake
from grpo.plumbing.log import Clock
from grpo.rollout import Inputs, draw_uniforms
from grpo.stats import log_softmax
from grpo.words import decode
from train_grpo import grpo_step

VOCABULARY = "aefhlp_"
TEXT = "h_l_"
WORDS = {"help": 0.8, "half": 0.8, "helf": 0.1, "halp": 0.1}  # the judge likes both words equally


def encode(texts):
    """Texts -> (n,T)."""
    return torch.tensor([[VOCABULARY.index(c) for c in text] for text in texts])


FILLS = encode(WORDS)  # (4,T)
MASKED = encode([TEXT])  # (1,T)
MASK = MASKED == VOCABULARY.index("_")  # (1,T)


class Table(torch.nn.Module):
    """A policy without a network: logits (K,T,V), the same whatever the input."""

    def __init__(self, n_latent):
        super().__init__()
        T = len(TEXT)
        logits = torch.full((n_latent, T, len(VOCABULARY)), float("-inf"))
        logits[:, range(T), FILLS] = 0  # a or e, f or p
        self.logits = torch.nn.Parameter(logits)

    def forward(self, tokens):
        return self.logits * 1


class WordReward:
    """The setting `reward`, of one part: WORDS."""

    names = ("words",)

    def __call__(self, completions, masked, mask, credit):
        worth = [WORDS[word] for word in decode(completions, VOCABULARY)]
        rewards = torch.tensor(worth).view(1, -1, 1)  # (B,G,1)
        return rewards, rewards

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
    for step in range(steps):
        uniforms = draw_uniforms(1, config.group_size, len(TEXT), (seed, step))  # (1,G,T)
        inputs = Inputs(MASKED, MASK, MASKED, uniforms, orders=None)  # no mini-batches
        grpo_step(policy, reference, rewards, optimizer, inputs, config, clock)
    log_p = log_softmax(policy.logits, config.temperature)  # (K,T,V)
    p = log_prob(log_p, FILLS[None], MASK).exp()  # (1,4)
    return dict(zip(WORDS, p[0].tolist()))


CASES = {  # title: arguments of `train`
    "before": {"n_latent": 1, "steps": 0},
    "committed: no coin": {"n_latent": 1},
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
        for word, p in found.items():
            at = ("pf".index(word[3]), "ea".index(word[1]))
            shade = "white" if p > 0.6 else "black"
            axes.text(*at, f"{word}\n{p:.2f}", ha="center", va="center", color=shade)
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
            numbers = "".join(f"{p:8.3f}" for p in results[title].values())
            print(f"{title:22s}{numbers}", flush=True)
        if args.plot:
            plot(args.plot, results)


if __name__ == "__main__":
    main()
