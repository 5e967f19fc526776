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
from grpo.plumbing.log import cut_back, read_metrics

FILE = "replay.jsonl"
FORMAT = 2
INPUTS = 8  # held-out inputs that are watched: the first
DRAWS = 200  # drawn characters: of a group too large for that the first completions are recorded


def pack(x, kind):
    """Turn a tensor into text: kind u1, whole numbers to 255, or f2, half precision."""
    return base64.b64encode(x.cpu().numpy().astype(kind).tobytes()).decode()


def unpack(text, kind, width):
    """Undo `pack`: an array with rows of `width`."""
    return np.frombuffer(base64.b64decode(text), kind).reshape(-1, width)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def view(policy, batch, vocabulary):
    """Take the best guess and each character's probability (n,V), 255 for 1, at all blanks."""
    q = policy(batch)
    guess = q.best_guess()[batch.mask]  # (n,)
    of_blanks = q.marginal().logits[batch.mask]  # (n,V)
    p = log_softmax(of_blanks, q.sampling.temperature).exp()
    return {
        "guess": decode(guess, vocabulary)[0],
        "probabilities": pack((255 * p).round(), "u1"),
    }


def append(config, line):
    with open(Path(config.out_dir) / FILE, "a") as file:
        file.write(json.dumps(line) + "\n")


def begin(before, held_out, config, start):
    """Write the header: what is watched, and the base model's view. A resumed run has it."""
    vocabulary = held_out.vocabulary
    few = held_out.batch[:INPUTS]
    header = {
        "iteration": -1,
        "format": FORMAT,
        "vocabulary": vocabulary,
        "texts": decode(few.tokens, vocabulary),
        "masked": decode(few.masked, vocabulary),
        **view(before, few, vocabulary),
    }
    path = Path(config.out_dir) / FILE
    old = read_metrics(path) if start and path.exists() else []
    if old and old[0]["masked"] == header["masked"]:
        cut_back(path, start)
    else:  # a new run, or one that goes on with other inputs
        path.unlink(missing_ok=True)
        append(config, header)


def record(policy, held_out, config, step, rollout):
    """Write what the policy says after the step, and that group of it which was pushed most."""
    at_blanks = rollout.advantages * rollout.batch.mask[:, None]  # (B,G,T)
    most = rollout[int(at_blanks.abs().sum(dim=(1, 2)).argmax())]  # without B
    mask = most.batch.mask  # (T,)
    text = most.batch.masked[most.batch.masked >= 0]  # padding is -1
    shown = slice(max(1, DRAWS // int(mask.sum())))
    blanks = most.fills.completions[shown, mask]  # (G,n)
    line = {
        "iteration": step,
        **view(policy, held_out.batch[:INPUTS], held_out.vocabulary),
        "masked": decode(text, held_out.vocabulary)[0],
        "fills": decode(blanks, held_out.vocabulary),
    }
    of_draws = {"rewards": most.reward, "advantages": most.advantages, "logp": most.old.logp}
    for name, values in of_draws.items():
        line[name] = pack(values[shown, mask], "f2")  # (G,n)
    append(config, line)
