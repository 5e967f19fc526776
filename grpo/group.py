"""One group of a step: which fills beat the rest, and how hard each character is pushed.

    python -m grpo.group                                    # of the default experiment's first step
    python -m grpo.group config/coin.py --plot=group.png    # settings as train_grpo.py takes them

The push on a drawn character is A · (1 − q(y)), the gradient of A · log q(y) on its own logit: up
where its fill was better than the group, and the harder the less sure the policy was of it.

Letters: G completions of one input, T characters.
"""

import sys

from grpo.bench import Turn
from grpo.compare import new_figure
from grpo.plumbing.config import exit_on_mistake, load_config
from grpo.plumbing.log import highlight
from grpo.plumbing.setup import pick_device
from grpo.words import decode


def first_group(config):
    """The first input of a run's first step: texts (G of them), mask (T,), pushes (G,T)."""
    device = pick_device(config.device)
    config.kernel = "torch"
    config.num_iterations = 1
    turn = Turn(config, device)
    turn()
    one = turn.rollout.take([0])
    push = one.advantages * (1 - one.old_logp.exp()) * one.mask[:, None]  # (K,g,T)
    texts = decode(one.completions, turn.data.vocabulary)
    return texts, one.mask[0], push.flatten(0, 1)


def scale(push, mask):
    """What one push in twenty exceeds, so that a single one does not make the rest look weak."""
    return push[:, mask].abs().quantile(0.95).item()


def sign(push, strong):
    """A push as a character: + or -, and ^ or v for more than a third of a strong one."""
    if abs(push) <= 0.03 * strong:
        return " "
    if abs(push) < strong / 3:
        return "+" if push > 0 else "-"
    return "^" if push > 0 else "v"


def as_text(texts, mask, push):
    """Each fill, and below its blanks which way its characters are pushed."""
    strong = scale(push, mask)
    lines = []
    for text, row in zip(texts, push.tolist()):
        signs = "".join(sign(p, strong) for p in row)
        lines.append(highlight(text, mask.tolist()))
        lines.append(highlight(signs, mask.tolist()).replace("[", " ").replace("]", " ").rstrip())
    return "\n".join(lines)


def plot(file, texts, mask, push):
    """A row for each fill, a column for each blank, coloured by the push."""
    blanks = mask.nonzero().squeeze(1)  # (N,)
    shown = push[:, blanks].cpu().numpy()  # (G,N)
    strong = scale(push, mask)  # stronger ones have its colour
    size = (2 + 0.4 * len(blanks), 1 + 0.3 * len(texts))
    figure = new_figure("plot", file, size)
    axes = figure.subplots()
    image = axes.imshow(shown, cmap="RdYlGn", vmin=-strong, vmax=strong, aspect="auto")
    for row, text in enumerate(texts):
        for column, t in enumerate(blanks.tolist()):
            axes.text(
                column, row, text[t], ha="center", va="center", color="black", family="monospace"
            )
    for column in range(1, len(blanks)):
        if blanks[column] > blanks[column - 1] + 1:  # another word begins
            axes.axvline(column - 0.5, color="black", linewidth=1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_ylabel("the fills of one input")
    axes.set_xlabel("blanks")
    figure.colorbar(image, extend="both", label="push: advantage x (1 - q)")
    figure.savefig(file)


def main(arguments):
    plots = [argument for argument in arguments if argument.startswith("--plot=")]
    if {"--help", "-h"} & set(arguments):
        print(__doc__.strip())
        return
    with exit_on_mistake("group"):
        config = load_config([argument for argument in arguments if argument not in plots])
        texts, mask, push = first_group(config)
        if plots:
            plot(plots[-1].removeprefix("--plot="), texts, mask, push)
    print(as_text(texts, mask, push))


if __name__ == "__main__":
    main(sys.argv[1:])
