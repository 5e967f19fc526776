"""replay.jsonl, what grpo/tools/replay.py makes its page from: a header, then a line for each step.

Letters: N held-out inputs, n blanks of one text or of all, G completions, T characters, V
vocabulary. A line has some 4 kB in the default experiment.
"""

import base64
import json
from pathlib import Path

import numpy as np
import torch

from data.words import decode
from grpo.logprobs import log_softmax
from grpo.mixture import likeliest, marginal
from grpo.plumbing.log import cut_back, read_metrics

FILE = "replay.jsonl"
FORMAT = 2
INPUTS = 8  # held-out inputs that are watched: the first
DRAWS = 200  # drawn characters: of a group too large for that the first completions are recorded


def pack(x, kind):
    """A tensor as text: kind u1, whole numbers to 255, or f2, half precision."""
    return base64.b64encode(x.cpu().numpy().astype(kind).tobytes()).decode()


def unpack(text, kind, width):
    """What `pack` packed, in rows of `width`."""
    return np.frombuffer(base64.b64decode(text), kind).reshape(-1, width)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def view(model, few, config):
    """Of the inputs' blanks the best guess, and p of every character, 255 for 1: (n,V) packed."""
    logits = model(few.masked)  # (N,T,V) or (N,T,K,V)
    guess = likeliest(logits, few.masked, few.mask, config.temperature)[few.mask]  # (n,)
    of_blanks = marginal(logits, few.mask, config.temperature)[few.mask]  # (n,V)
    p = log_softmax(of_blanks, config.temperature).exp()
    return {
        "guess": decode(guess, few.vocabulary)[0],
        "probabilities": pack((255 * p).round(), "u1"),
    }


def append(config, line):
    with open(Path(config.out_dir) / FILE, "a") as file:
        file.write(json.dumps(line) + "\n")


def begin(before, held_out, config, start):
    """The header: what is watched, and the base model's view. A resumed run keeps its lines."""
    few = held_out.first(INPUTS)
    header = {
        "iteration": -1,
        "format": FORMAT,
        "vocabulary": few.vocabulary,
        "texts": decode(few.tokens, few.vocabulary),
        "masked": decode(few.masked, few.vocabulary),
        **view(before, few, config),
    }
    path = Path(config.out_dir) / FILE
    old = read_metrics(path) if start and path.exists() else []
    if old and old[0]["masked"] == header["masked"]:
        cut_back(path, start)
    else:  # a new run, or one that goes on with other inputs
        path.unlink(missing_ok=True)
        append(config, header)


def record(policy, held_out, config, step, rollout):
    """What the policy says after the step, and that group of the step which it pushed most."""
    size = (rollout.advantages * rollout.inputs.mask[:, None]).abs().sum(dim=(1, 2))  # (B,)
    most = rollout.take(int(size.argmax()))  # without B
    mask = most.inputs.mask  # (T,)
    text = most.inputs.masked[most.inputs.masked >= 0]  # padding is -1
    shown = slice(max(1, DRAWS // int(mask.sum())))
    blanks = most.fills.completions[shown, mask]  # (G,n)
    line = {
        "iteration": step,
        **view(policy, held_out.first(INPUTS), config),
        "masked": decode(text, held_out.vocabulary)[0],
        "fills": decode(blanks, held_out.vocabulary),
    }
    of_draws = {"rewards": most.credits, "advantages": most.advantages, "logp": most.old.logp}
    for name, values in of_draws.items():
        line[name] = pack(values.expand(-1, len(mask))[shown, mask], "f2")  # (G,n)
    append(config, line)
