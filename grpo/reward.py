"""
What a completion is worth: the frozen judge's view, valid words, your own function, or a weighted sum of them.

    --reward=judge                                                              the default
    --reward=judge:1.0,valid_words:0.5,my_rewards.py:no_double_space:0.1

Letters: B masked inputs, T characters, G group size. A reward is a function

    reward(completions, masked, mask, decode) -> (B,G)

of completions (B,G,T), masked (B,T), mask (B,T) bool: True at the blanks; `decode` turns any (...,T) tokens into a flat list of strings.
"""

import importlib.util
import math

import torch
import torch.nn.functional as F

from grpo import words
from grpo.plumbing.stop import RewardFailed

ROWS = 32  # judged at once on a CPU: as fast as 64, with less to fill up; the activations of more leave its cache


@torch.no_grad()
def judge_scores(judge, completions):
    """P(real) of every character: completions (B,G,T) -> (B,G,T) in [0,1]. `judge` maps (N,T) to logits (N,T).

    On a CPU each of the D different completions is judged once, in batches of one shape. On CUDA, counting them would wait for the device.
    """
    rows = completions.flatten(0, 1)  # (B·G,T)
    if rows.device.type != "cpu":
        return judge(rows).float().sigmoid().view(completions.shape)
    different, which = rows.unique(dim=0, return_inverse=True)  # (D,T), (B·G,)
    size = max(1, min(ROWS, len(rows)))
    parts = F.pad(different, (0, 0, 0, -len(different) % size)).split(size)  # each (size,T)
    return torch.cat([judge(part).float().sigmoid() for part in parts])[which].view(
        completions.shape
    )


def credit(scores, mask, by="input", real=1.0):
    """What each blank is rewarded by: judge scores (B,G,T), mask (B,T) -> (B,G,1), or (B,G,T) where blanks are credited one by one.

    input  the mean over the whole input, the reward of GRPO; `real` (B,1,T) leaves out what is no character but padding
    run    the mean over the run of adjacent blanks that the blank stands in: with whole words hidden, its word. What happens to another
           word is noise in its gradient. The price is a bias: what it does to the judge's view of the rest is not credited.
    """
    if by == "input":
        real = real * torch.ones_like(scores[:, :1])  # (B,1,T)
        return (scores * real).sum(dim=-1, keepdim=True) / real.sum(dim=-1, keepdim=True)
    starts = mask & ~F.pad(mask, (1, 0))[:, :-1]  # (B,T)
    run = (starts.cumsum(dim=1) * mask)[:, None].expand_as(
        scores
    )  # (B,G,T) number of the run, 0: no blank
    total, count = (
        torch.zeros_like(F.pad(scores, (0, 1))).scatter_add_(2, run, x)
        for x in (scores, torch.ones_like(scores))
    )
    return total.gather(2, run) / count.gather(2, run)


def valid_words(lexicon):
    """-> the reward "share of hidden words whose fill is a word of the lexicon" (`words.is_valid`)."""

    def reward(completions, masked, mask, decode):
        B, G, _ = completions.shape
        texts, flags, shares = decode(completions), mask.cpu().numpy(), torch.zeros(B, G)
        for b, shown in enumerate(decode(masked)):
            spans = words.hidden_words(
                "".join("a" if blank else c for c, blank in zip(shown, flags[b])), flags[b]
            )  # a blank is taken for a letter
            for g in range(G):
                shares[b, g] = sum(
                    words.is_valid(texts[b * G + g], *span, lexicon) for span in spans
                ) / max(len(spans), 1)
        return shares

    return reward


def parse_reward(text):
    """ "judge:1,my.py:f:0.5" -> {"judge": 1.0, "my.py:f": 0.5}, without the parts that weigh 0. ValueError if it is not of this form."""
    weights = {}
    for part in map(str.strip, text.split(",")):
        name, _, last = part.rpartition(":")
        try:
            weight = float(last)
        except ValueError:
            name, weight = part, 1.0
        file, _, function = name.rpartition(":")
        if (
            name in weights
            or not (
                name in ("judge", "valid_words") or file.endswith(".py") and function.isidentifier()
            )
            or not math.isfinite(weight)
        ):
            raise ValueError(
                f"reward={text!r} has a part {part!r}; allowed: NAME or NAME:WEIGHT, with NAME judge, valid_words or FILE.py:FUNCTION, each once"
            )
        weights[name] = weight
    weights = {name: weight for name, weight in weights.items() if weight}
    if not weights or len({name.rpartition(":")[2] for name in weights}) < len(weights):
        raise ValueError(
            f"reward={text!r} has no part of a weight other than 0, or two functions of one name; write for example reward=judge:1.0,valid_words:0.5"
        )
    return weights


def load_function(name):
    """ "my_rewards.py:no_double_space" -> the function. ValueError if there is none."""
    path, _, function = name.rpartition(":")
    try:
        spec = importlib.util.spec_from_file_location("reward", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever the user's code may raise is the user's mistake
        raise ValueError(
            f"reward {name}: {path} does not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; mend it"
        ) from None
    if not callable(getattr(module, function, None)):
        raise ValueError(
            f"reward {name}: {path} has no function {function!r}; write def {function}(completions, masked, mask, decode) there"
        )
    return getattr(module, function)


class Rewards:
    """The setting `reward`, ready to score completions: `names` and `weights` of its R parts."""

    def __init__(self, judge, text="judge", vocabulary="", lexicon=()):
        parts = parse_reward(text)
        self.judge, self.weights, self.names = (
            judge,
            list(parts.values()),
            [name.rpartition(":")[2] for name in parts],
        )
        self.functions = [
            None
            if name == "judge"
            else valid_words(lexicon)
            if name == "valid_words"
            else load_function(name)
            for name in parts
        ]
        self.decode = lambda tokens: words.decode(tokens, vocabulary)

    def ask(self, i, completions, masked, mask):
        """What function i says (B,G), float32. RewardFailed, with its name, if it fails or returns what is not finite or of another shape."""
        try:
            values = torch.as_tensor(
                self.functions[i](completions, masked, mask, self.decode),
                dtype=torch.float32,
                device=completions.device,
            )
        except Exception as error:  # whatever the user's code may raise
            raise RewardFailed(
                f"reward {self.names[i]} failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; mend it"
            ) from error
        if values.shape != completions.shape[:2] or not values.isfinite().all():
            raise RewardFailed(
                f"reward {self.names[i]} returned the shape {tuple(values.shape)} with {int((~values.isfinite()).sum())} values that are not finite; "
                f"it must return finite numbers of the shape (B, G) = {tuple(completions.shape[:2])}"
            )
        return values

    def ask_all(self, completions, masked, mask):
        """What every part but the judge says: {name: (B,G)}."""
        return {
            self.names[i]: self.ask(i, completions, masked, mask)
            for i, function in enumerate(self.functions)
            if function
        }

    def __call__(self, completions, masked, mask, by="input"):
        """-> what each blank is credited with, the weighted sum, (B,G,1) or (B,G,T); and the parts, what each says of the whole completion, (B,G,R).

        Only the judge's part can be credited per blank, where `by` is "run".
        """
        real, parts, credits = (masked >= 0)[:, None], [], 0
        for i, weight in enumerate(self.weights):
            if self.functions[i] is None:
                scores = judge_scores(self.judge, completions)  # (B,G,T)
                part, own = (
                    credit(scores, mask, real=real),
                    credit(scores, mask, by, real),
                )  # (B,G,1), (B,G,1) or (B,G,T)
            else:
                part = own = self.ask(i, completions, masked, mask)[..., None]  # (B,G,1)
            parts.append(part)
            credits = credits + weight * own
        return credits, torch.cat(parts, dim=-1)

    def total(self, parts):
        """(B,G,R) -> the weighted sum (B,G)."""
        return sum(weight * parts[..., i] for i, weight in enumerate(self.weights))
