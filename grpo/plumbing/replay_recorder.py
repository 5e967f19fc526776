"""This writes replay.jsonl, for grpo/tools/replay.py: a header, then a line for each step.

A line says how sure the policy is of every letter of a few held-out inputs after the step. It also
holds the group of completions that the step pushed most, with the numbers of each drawn letter:
those from before the updates, and its ratio after them. A line has some 9 kB in the default
experiment.

Letters: N held-out inputs, n blanks of one text or of all, G completions, T characters, V
vocabulary.
"""

import base64
import json
from pathlib import Path

import numpy as np
import torch

from data.dataset import decode
from grpo.logprobs import log_softmax
from grpo.loss import log_ratio, policy_objective
from grpo.plumbing.log import cut_back, read_metrics

FILE = "replay.jsonl"
FORMAT = 3
INPUTS = 8  # held-out inputs that are watched: the first
DRAWS = 200  # at most so many letters of a group are recorded, those of its first completions


def unpack(text, width):
    """Read what `view` packed: a text -> an array of whole numbers to 255, in rows of `width`."""
    return np.frombuffer(base64.b64decode(text), "u1").reshape(-1, width)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def view(policy, batch, vocabulary):
    """Take the best guess and each character's probability (n,V), 255 for 1, at all blanks."""
    q = policy(batch)
    guess = q.best_guess()[batch.mask]  # (n,)
    of_blanks = q.marginal().logits[batch.mask]  # (n,V)
    p = log_softmax(of_blanks, q.sampling.temperature).exp()
    packed = (255 * p).round().byte().cpu().numpy().tobytes()
    return {
        "guess": decode(guess, vocabulary)[0],
        "probabilities": base64.b64encode(packed).decode(),
    }


def append(config, line):
    with open(Path(config.out_dir) / FILE, "a") as file:
        file.write(json.dumps(line) + "\n")


def begin(before, held_out, config, start):
    """Write the header, with the base model's view. A resumed run keeps the one it has."""
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


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def record(policy, held_out, config, step, rollout):
    """Write what the policy says after the step, and the group that the step pushed most.

    The ratio of a letter is that of the policy after all updates of the step, which is also what
    another update on the same draws would see. `bounded` says whether a bound of the objective,
    such as the clip, would act on it there.
    """
    at_blanks = rollout.advantages * rollout.batch.mask[:, None]  # (B,G,T)
    most = at_blanks.abs().sum(dim=(1, 2)).argmax()
    group = rollout[most[None]]  # the same with B = 1
    words, mask = group.batch.words, group.batch.mask[0]  # (1,T), (T,)
    q = policy(group.batch)
    logp = q.score(group.fills, q).logp  # (1,G,T)
    drawn = (group.old.logp, group.advantages, words, config)
    of_draws = {
        "reward": group.reward,
        "advantage": group.advantages,
        "logp": group.old.logp,
        "log_ratio": log_ratio(logp, group.old.logp, words, config.importance_sampling_level),
        "bounded": policy_objective(logp, *drawn)[1],
    }
    text = group.batch.masked[group.batch.masked >= 0]  # padding is -1
    shown = slice(max(1, DRAWS // int(mask.sum())))
    line = {
        "iteration": step,
        **view(policy, held_out.batch[:INPUTS], held_out.vocabulary),
        "masked": decode(text, held_out.vocabulary)[0],
        "fills": decode(group.fills.completions[0, shown, mask], held_out.vocabulary),
    }
    for name, values in of_draws.items():
        line[name] = values[0, shown, mask].double().round(decimals=4).tolist()  # (G,n)
    append(config, line)
