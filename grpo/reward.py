"""What a completion is worth: a frozen judge's view, valid words, your own function, or a sum.

    --reward=judge                                                              the default
    --reward=judge:1.0,valid_words:0.5,my_rewards.py:no_double_space:0.1
    --reward=judge:0.5,model/pretrained/judge_naive.pt:0.5                      two judges

Letters: B masked inputs, T characters, G group size. A reward is a function

    reward(completions, masked, mask, decode) -> (B,G), or (B,G,T) where it speaks of each character

of completions (B,G,T), masked (B,T), mask (B,T) bool: True at the blanks; `decode` turns any
(...,T) tokens into a flat list of strings. A judge, a model, maps tokens (N,T) to logits (N,T).
"""

import math
import runpy
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from grpo import words
from grpo.plumbing.checkpoint import load_model
from grpo.plumbing.setup import forward
from grpo.plumbing.stop import RewardFailed, told

CPU_ROWS = 32  # judged at once on a CPU: as fast as 64; the activations of more leave its cache
COLUMNS = ("input", "completion", "judge")  # of completions.jsonl, beside a reward's own
CUDA_ROWS = 8192  # bounds the memory of activations


@torch.no_grad()
def judge_scores(judge, completions):
    """P(real) of every character: completions (B,G,T) -> (B,G,T) in [0,1]; judge: (N,T) -> (N,T).

    On a CPU each of the D different completions is judged once, in batches of one shape. On CUDA,
    counting them would wait for the device.
    """
    rows = completions.flatten(0, 1)  # (B·G,T)
    size = CUDA_ROWS
    which = slice(None)  # each row is its own
    if rows.device.type == "cpu":
        size = min(CPU_ROWS, len(rows))
        rows, which = rows.unique(dim=0, return_inverse=True)  # (D,T), (B·G,)
        rows = F.pad(rows, (0, 0, 0, -len(rows) % size))  # (multiple of size,T)
    logits = torch.cat([judge(part) for part in rows.split(size)])  # as rows
    return logits.float().sigmoid()[which].view(completions.shape)


def mean_over_input(scores, masked):
    """scores (B,G,T) -> (B,G): the mean over an input's characters; padding (-1) is none."""
    real = (masked >= 0)[:, None].to(scores.dtype)  # (B,1,T)
    return (scores * real).sum(dim=-1) / real.sum(dim=-1)


def begins_run(mask):
    """Is it the first of a run of adjacent blanks? (B,T) bool -> (B,T) bool."""
    before = F.pad(mask, (1, 0))[:, :-1]  # (B,T) a blank just before?
    return mask & ~before


def mean_over_run(scores, mask):
    """scores (B,G,T) -> (B,G,T): at a blank, the mean over the run of blanks that it stands in."""
    run = begins_run(mask).cumsum(dim=1) * mask  # (B,T) the run's number, 0: no blank
    same = (run[:, :, None] == run[:, None]).to(scores.dtype)  # (B,T,T) s and t of one run?
    return (scores @ same) / same.sum(dim=1)[:, None]  # the sum over t's run, by its length


def valid_words(lexicon, completions, masked, mask, decode, cut=True):
    """The share of an input's hidden words whose fill is a word of the lexicon: -> (B,G)."""
    B, G, _ = completions.shape
    flags = mask.repeat_interleave(G, dim=0).cpu().numpy()  # (B·G,T)
    shares = []
    for text, blanks in zip(decode(completions), flags):
        spans = words.filled_words(text, blanks, cut)
        valid = sum(words.is_valid(text, start, end, lexicon) for start, end in spans)
        shares.append(valid / max(len(spans), 1))
    return torch.tensor(shares).view(B, G)


def parse_reward(text):
    """The setting -> its parts, "judge:1,my.py:f:0.5" -> {"judge": 1.0, "my.py:f": 0.5}.

    Without the parts that weigh 0. ValueError if it is not of this form.
    """
    weights = {}
    for part in map(str.strip, text.split(",")):
        name, _, last = part.rpartition(":")
        try:
            weight = float(last)
        except ValueError:
            name = part
            weight = 1.0
        file, _, function = name.rpartition(":")
        own = file.endswith(".py") and function.isidentifier()
        known = name in ("judge", "valid_words") or name.endswith(".pt") or own
        if name in weights or not known or not math.isfinite(weight):
            raise ValueError(
                f"reward={text!r} has a part {part!r}; allowed: NAME or NAME:WEIGHT, each NAME"
                " once: judge, valid_words, FILE.py:FUNCTION, or JUDGE.pt"
            )
        if name != "judge" and short_name(name) in COLUMNS:
            raise ValueError(
                f"reward={text!r}: no part may be called {short_name(name)!r}, as a column of"
                " completions.jsonl is; give it another name"
            )
        weights[name] = weight
    weights = {name: weight for name, weight in weights.items() if weight}
    if not weights or len(set(map(short_name, weights))) < len(weights):
        raise ValueError(
            f"reward={text!r} has no part of a weight other than 0, or two parts of one name;"
            " write for example reward=judge:1.0,valid_words:0.5"
        )
    return weights


def short_name(name):
    """A part in metrics and errors: "my.py:f" -> "f", "model/judge_b.pt" -> "judge_b"."""
    if name.endswith(".pt"):
        return Path(name).stem
    return name.rpartition(":")[2]


def load_function(name):
    """ "my_rewards.py:no_double_space" -> the function. ValueError if there is none."""
    path, _, function = name.rpartition(":")
    try:
        values = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # whatever the user's code may raise
        raise ValueError(f"reward {name}: {path} does not run: {told(error)}; mend it") from None
    if not callable(values.get(function)):
        raise ValueError(
            f"reward {name}: {path} has no function {function!r};"
            f" write def {function}(completions, masked, mask, decode) there"
        )
    return values[function]


class Rewards:
    """The setting `reward`, ready to score completions: `names` and `weights` of its P parts."""

    def __init__(self, judge, config, vocabulary, lexicon, device):
        """`judge` maps tokens to logits; a second judge, named by its file, goes to `device`."""
        parts = parse_reward(config.reward)
        self.names = [short_name(name) for name in parts]
        self.weights = list(parts.values())
        # (P,) the most that two completions of one group have differed in each part.
        self.spans = torch.zeros(len(parts), device=device)
        self.judges = {}
        self.functions = {}
        for name in parts:
            short = short_name(name)
            if name == "judge":
                self.judges[short] = judge
            elif name.endswith(".pt"):
                other = load_model(name, "judge", vocabulary).requires_grad_(False)
                self.judges[short] = forward(other, device, config)
            elif name == "valid_words":
                cut = not config.prompts_file
                self.functions[short] = partial(valid_words, lexicon, cut=cut)
            else:
                self.functions[short] = load_function(name)
        self.decode = partial(words.decode, vocabulary=vocabulary)

    def score(self, name, completions, masked, mask):
        """What one part says: (B,G), or (B,G,T) of each character. RewardFailed if it fails.

        A judge waits for nothing; what is not finite there is found in the step's metrics.
        """
        if name in self.judges:
            return judge_scores(self.judges[name], completions)
        own = (completions.clone(), masked.clone(), mask.clone())  # it may write into them
        try:
            values = self.functions[name](*own, self.decode)
            values = torch.as_tensor(values, dtype=torch.float32, device=completions.device)
        except (Exception, SystemExit) as error:  # whatever the user's code may raise
            raise RewardFailed(f"reward {name} failed: {told(error)}; mend it") from error
        allowed = (completions.shape[:2], completions.shape)
        if values.shape not in allowed:
            raise RewardFailed(
                f"reward {name} returned the shape {tuple(values.shape)}; it must return"
                f" (B, G) = {tuple(allowed[0])} or (B, G, T) = {tuple(allowed[1])}"
            )
        if not values.isfinite().all():
            infinite = int((~values.isfinite()).sum())
            raise RewardFailed(
                f"reward {name} returned {infinite} values that are not finite;"
                " it must return finite numbers"
            )
        return values

    def __call__(self, completions, masked, mask, credit):
        """-> what each blank is credited with, and what each part says of whole completions.

        credits (B,G,1) with `credit=input`: the weighted sum of the parts. (B,G,T) with
        `credit=run`: a part that speaks of each character is averaged over the blank's own run of
        adjacent blanks: with whole words hidden, its word. What happens to another word is noise in
        its gradient. The price is a bias: what it does to the view of the rest is not credited.
        parts (B,G,P): the mean over the input of each part.
        """
        credits = 0
        parts = []
        spans = []
        for name, weight in zip(self.names, self.weights):
            values = self.score(name, completions, masked, mask)  # (B,G) or (B,G,T)
            whole = mean_over_input(values, masked) if values.dim() == 3 else values  # (B,G)
            own = whole[..., None]  # (B,G,1)
            if credit == "run" and values.dim() == 3:
                own = mean_over_run(values, mask)  # (B,G,T)
            credits = credits + weight * own
            parts.append(whole)
            spans.append((values.amax(dim=1) - values.amin(dim=1)).max())
        self.spans = self.spans.maximum(torch.stack(spans))  # stays on the device
        if credit == "run":
            credits = credits.expand(completions.shape)  # (B,G,T)
        return credits, torch.stack(parts, dim=-1)

    def total(self, parts):
        """(B,G,P) -> the weighted sum (B,G)."""
        return sum(weight * parts[..., i] for i, weight in enumerate(self.weights))
