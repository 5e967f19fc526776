"""What a completion is worth: a frozen judge's view, valid words, your own function, or a sum.

    --reward=judge                                                              the default
    --reward=judge:1.0,valid_words:0.5,my_rewards.py:no_double_space:0.1
    --reward=judge:0.5,model/pretrained/judge_naive.pt:0.5                      two judges

Letters: B masked inputs, T characters, G group size. A reward is a function

    reward(completions, masked, mask, decode) -> (B,G), or (B,G,T) where it speaks of each character

of completions (B,G,T), masked (B,T), mask (B,T) bool: True at the blanks; `decode` turns any
(...,T) tokens into a flat list of strings. A judge, a model, maps tokens (N,T) to logits (N,T): its
log-odds that a character was not filled in.
`grpo/plumbing/setup.py` loads what the setting `reward` names.
"""

import torch
import torch.nn.functional as F

from data import words

CPU_ROWS = 32  # judged at once on a CPU: as fast as 64; the activations of more leave its cache
CUDA_ROWS = 8192  # bounds the memory of activations
SUREST = 8  # log-odds beyond that are none the better


class RewardFailed(ValueError):
    """A user's own reward raised, or returned what is no reward."""


@torch.no_grad()
def judge_logits(judge, completions):
    """The log-odds of every character: completions (B,G,T) -> (B,G,T); judge: (N,T) -> (N,T).

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
    return logits.float()[which].view(completions.shape)


def mean_over_blanks(scores, mask):
    """scores (B,G,T) -> (B,G): the mean over an input's blanks."""
    return (scores * mask[:, None]).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)[:, None]


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
    """The share of an input's hidden words whose fill is a word of the lexicon: -> (B,G).

    A blank is taken for a letter: what is hidden between two spaces is one word.
    """
    G = completions.shape[1]
    texts = decode(completions)
    letters = decode(completions[:, 0].masked_fill(mask, 1))  # token 1: the letter a
    blanks = mask.cpu().numpy()  # (B,T)
    shares = []
    for i, filled in enumerate(letters):
        spans = words.hidden_words(filled, blanks[i], cut)
        for text in texts[i * G : (i + 1) * G]:
            valid = [words.is_valid(text, *span, lexicon) for span in spans]
            shares.append(sum(valid) / max(len(valid), 1))
    return torch.tensor(shares, device=mask.device).view(-1, G)


def log_odds(judge, completions, mask):
    """Of each blank's run, as the judge learned them (model/losses.py): log p/q -> (B,G,T)."""
    return mean_over_run(judge_logits(judge, completions), mask).clamp(-SUREST, SUREST)


def judge_reward(judge, judge_score, completions, masked, mask, decode):
    """Of each blank's run the log-odds of being text, or P(real): -> (B,G,T)."""
    logits = log_odds(judge, completions, mask)  # (B,G,T)
    return logits if judge_score == "log_odds" else logits.sigmoid()


def own_reward(name, function, completions, masked, mask, decode):
    """A user's function as a reward. Raises RewardFailed, from the error, where it is none."""
    own = (completions.clone(), masked.clone(), mask.clone())  # it may write into them
    try:
        values = function(*own, decode)
        values = torch.as_tensor(values, dtype=torch.float32, device=completions.device)
    except Exception as error:  # whatever the user's code may raise
        raise RewardFailed(f"reward {name} failed: {type(error).__name__}: {error}") from error
    allowed = (completions.shape[:2], completions.shape)
    if values.shape not in allowed or not values.isfinite().all():
        raise RewardFailed(
            f"reward {name} returned {tuple(values.shape)} numbers, or some that are not finite;"
            f" it must return (B, G) = {tuple(allowed[0])} or (B, G, T) finite numbers"
        )
    return values


class Rewards:
    """The setting `reward`, ready to score completions: a weighted sum of P parts."""

    def __init__(self, parts, decode):
        """parts: {name in the metrics: (reward function, weight)}."""
        self.parts = parts
        self.decode = decode

    def score(self, name, completions, masked, mask):
        """What one part says: -> (B,G,T), the same at all characters if it is of the whole."""
        function, _ = self.parts[name]
        values = function(completions, masked, mask, self.decode)  # (B,G) or (B,G,T)
        if values.dim() == 2:
            values = values[..., None]  # (B,G,1)
        return values.expand(completions.shape)

    def __call__(self, fills, inputs, credit):
        """-> what each blank is credited with, and what each part says of whole completions.

        credits (B,G,1) with `credit=input`: the weighted sum of the parts. (B,G,T) with
        `credit=run`: a part that speaks of each character is averaged over the blank's own run of
        adjacent blanks: with whole words hidden, its word. What happens to another word is noise in
        its gradient. The price is a bias: what it does to the view of the rest is not credited.
        parts (B,G,P): the mean over the input's blanks of each part.
        """
        credits = 0
        parts = []
        for name, (_, weight) in self.parts.items():
            each = self.score(name, fills.completions, inputs.masked, inputs.mask)  # (B,G,T)
            whole = mean_over_blanks(each, inputs.mask)  # (B,G)
            own = whole[..., None]  # (B,G,1)
            if credit == "run":
                own = mean_over_run(each, inputs.mask)  # (B,G,T)
            credits = credits + weight * own
            parts.append(whole)
        return credits, torch.stack(parts, dim=-1)

    def total(self, parts):
        """(B,G,P) -> the weighted sum (B,G)."""
        return sum(w * parts[..., i] for i, (_, w) in enumerate(self.parts.values()))
