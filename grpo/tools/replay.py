"""Show how a run learns: `python -m grpo.tools.replay out` writes the web page out/replay.html.

With several runs, `python -m grpo.tools.replay out-a out-b` writes curves.html into the working
directory. This page draws each metric of metrics.jsonl, with one line for each group of runs that
differ only in their seed. What follows is about the page of one run.

The page shows step by step how the run fills held-out texts, and which of the letters drawn in a
step became likelier or less likely. The template beside this file, replay.html, draws the page.
This command puts data into the template: the run's metrics, its settings, and the lines that the
run recorded in replay.jsonl with `begin` and `record`, a header, then a line for each step.

A line says how likely each character is at each blank of a few held-out inputs, after the step. It
also holds the first completions of one group, the one with the largest sum of |advantages|. For
each letter drawn in them the line holds the reward, the advantage, the log-probability before the
updates, and the log of the importance ratio after them. In the default experiment a line takes
about 9 kB.

Shapes: n blanks, G completions, T characters, V vocabulary. In `view` n counts the blanks of all
inputs, and in `record` those of one input.
"""

import base64
import json
from pathlib import Path

import torch

from data.user_mistake import exit_on_mistake, refuse
from data.vocabulary import VOCABULARY, decode
from grpo.loss import OBJECTIVES
from grpo.plumbing.checkpoint import write
from grpo.plumbing.config import Parser
from grpo.plumbing.log import cut_back, read_lines
from grpo.plumbing.network import uncompiled
from grpo.plumbing.runs import group_runs
from grpo.policy import log_softmax

PAGE = Path(__file__).with_suffix(".html")
PAGE_OF_CURVES = PAGE.with_name("curves.html")
# Of these metrics the page shows those that the run has.
CURVES = ("mean_reward", "valid_words", "right", "mean_kl", "entropy")
FILE = "replay.jsonl"
INPUTS = 8  # each line shows this many held-out inputs
DRAWS = 200  # a line records about this many drawn letters


def shown_inputs(held_out):
    """Choose the page's inputs. Those with a single blank, where nothing clashes, come last."""
    single = held_out.batch.mask.sum(dim=1) == 1  # (N,)
    first = single.int().argsort(stable=True)[:INPUTS]
    return held_out.batch[first]


@torch.no_grad()
@uncompiled()
def view(policy, batch):
    """Return the policy's best guess, and each character's probability, at all blanks of a batch.

    The probabilities (n,V) are rounded to bytes, with 255 for 1, and returned as base64 text.
    """
    q = policy(batch)
    guess = q.best_guess()[batch.mask]  # (n,)
    of_blanks = q.marginal().logits[batch.mask]  # (n,V)
    p = log_softmax(of_blanks, q.config.temperature).exp()
    packed = (255 * p).round().byte().cpu().numpy().tobytes()
    return {
        "guess": decode(guess)[0],
        "probabilities": base64.b64encode(packed).decode(),
    }


def append(config, line):
    with open(Path(config.out_dir) / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def begin(before, held_out, config, start):
    """Write the header, with the base model's best guess and probabilities.

    A resumed run with the same held-out inputs keeps the header of its file.
    """
    few = shown_inputs(held_out)
    header = {
        "iteration": -1,
        "vocabulary": VOCABULARY[: before.network.vocab_size],
        "texts": decode(few.tokens),
        "masked": decode(few.masked),
        **view(before, few),
    }
    path = Path(config.out_dir) / FILE
    old = read_lines(path) if start and path.exists() else []
    if old and old[0]["masked"] == header["masked"]:
        cut_back(path, start)
    else:  # a new run, or a resumed one with other held-out inputs
        path.unlink(missing_ok=True)
        append(config, header)


@torch.no_grad()
@uncompiled()
def record(policy, held_out, config, step, rollout):
    """Write the policy's best guess and probabilities after the step, and one group of completions.

    We take the group with the largest sum of |advantages|. The field `log_ratio` compares the
    policy after all updates of the step with the policy that drew the letter. The field `bounded`
    says whether the objective would limit this ratio in one more update, for example by the clip.
    """
    at_blanks = rollout.advantages * rollout.batch.mask[:, None]  # (B,G,T)
    most = at_blanks.abs().sum(dim=(1, 2)).argmax()
    group = rollout[most[None]]  # only the input with the largest sum, B = 1
    words, mask = group.batch.words, group.batch.mask[0]  # (1,T), (T,)
    q = policy(group.batch)
    logp = q.score(group.fills, q).logp  # (1,G,T)
    objective = OBJECTIVES[config.objective]
    of_draws = {
        "reward": group.reward,
        "advantage": group.advantages,
        "logp": group.old.logp,
        "log_ratio": logp - group.old.logp,
        "bounded": objective(logp, group.old.logp, group.advantages, words, config)[1],
    }
    text = group.batch.masked[group.batch.masked >= 0]  # padding is -1
    shown = slice(max(1, DRAWS // int(mask.sum())))
    line = {
        "iteration": step,
        **view(policy, shown_inputs(held_out)),
        "masked": decode(text)[0],
        "fills": decode(group.fills.completions[0, shown, mask]),
    }
    for name, values in of_draws.items():
        line[name] = values[0, shown, mask].double().round(decimals=4).tolist()  # (G,n)
    append(config, line)


def read_steps(path, least):
    """Read a .jsonl file of a run. Raises a Mistake if it has fewer lines than `least`."""
    lines = read_lines(path) if path.exists() else []
    refuse(len(lines) < least, f"{path} is missing or holds no step; name the out_dir of a run")
    return lines


def page(folder):
    """Fill the template with a run's recorded lines, curves and settings: -> the page as HTML."""
    lines = read_steps(Path(folder) / FILE, 2)
    metrics = read_lines(Path(folder) / "metrics.jsonl")
    figures = {line["iteration"]: line for line in metrics}
    shown = {
        "run": str(folder),
        "lines": lines,
        "curves": {
            name: [figures[line["iteration"]][name] for line in lines[1:]]
            for name in CURVES
            if name in metrics[0]
        },
        "config": json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")),
    }
    return fill_template(PAGE, shown)


def fill_template(path, shown):
    """Put what a page shows, as JSON, into its template: -> the page as HTML."""
    content = json.dumps(shown).replace("<", "\\u003c")  # no text can close the <script>
    return path.read_text(encoding="utf-8").replace("DATA", content, 1)


def page_of_curves(folders):
    """Fill the template with the metrics of several runs, in groups: -> the page as HTML."""
    shown = []
    for group in group_runs(folders):
        paths = {folder: Path(folder) / "metrics.jsonl" for folder in group.folders}
        runs = {folder: read_steps(path, 1) for folder, path in paths.items()}
        shown.append({"settings": group.settings, "runs": runs})
    return fill_template(PAGE_OF_CURVES, shown)


def main(arguments=None):
    with exit_on_mistake("replay"):
        parser = Parser(
            prog="python -m grpo.tools.replay",
            description="Write a web page that shows how a run learned, or compares several runs.",
        )
        parser.add_argument(
            "folders", metavar="out_dir", nargs="+", help="a run's folder; several are compared"
        )
        folders = parser.parse_args(arguments).folders
        if len(folders) == 1:
            path, html = Path(folders[0]) / "replay.html", page(folders[0])
        else:
            path, html = Path("curves.html"), page_of_curves(folders)
        write(path, html.encode())
        print(f"open in a browser: {path}")


if __name__ == "__main__":
    main()
