"""A completion's reward comes from a judge, valid words, your own function, or a sum of these.

    --reward=judge                                                              the default
    --reward=judge:1.0,valid_words:0.5,my_rewards.py:no_double_space:0.1
    --reward=judge:0.5,model/pretrained/judge_naive.pt:0.5                      two judges

Your own reward is a function of completions (B,G,T), the masked inputs (B,T) and mask (B,T) bool,
True at the blanks. `decode` turns any (...,T) tokens into a flat list of strings:

    reward(completions, masked, mask, decode) -> (B,G), or (B,G,T) with a number for each character

A judge is a model that maps tokens (N,T) to logits (N,T). A logit is the judge's log-odds that the
character stood in the text and was not filled in. `grpo/plumbing/load.py` loads the judges and
functions that the setting `reward` names.

Shapes: B masked inputs, T characters, G completions of each, N rows of tokens, D rows without
repeats.
"""

import torch
import torch.nn.functional as F

from data.lexicon import hidden_spans, is_valid
from data.per_word import begins_word, mean_over_blanks, mean_over_words
from data.user_mistake import Mistake, refuse
from data.vocabulary import VOCABULARY, decode

CPU_ROWS = 32  # rows that a CPU judges at once; many more would overflow its cache
CUDA_ROWS = 8192  # rows that a GPU judges at once, so that the activations fit into its memory
A_LETTER = VOCABULARY.index("a")
SUREST = 8  # nats; the score of a word is cut off at ±8


@torch.no_grad()
def judge_logits(judge, completions):
    """Ask the judge for the log-odds of every character: completions (B,G,T) -> (B,G,T).

    On a CPU we judge equal completions only once, in batches that all have the same shape. On CUDA
    we judge every completion, because finding equal ones would make the CPU wait for the GPU.
    """
    rows = completions.flatten(0, 1)  # (B·G,T)
    size = CUDA_ROWS
    which = slice(None)  # each completion has its own row of logits
    if rows.device.type == "cpu":
        size = min(CPU_ROWS, len(rows))
        rows, which = rows.unique(dim=0, return_inverse=True)  # (D,T), (B·G,)
        rows = F.pad(rows, (0, 0, 0, -len(rows) % size))  # (multiple of size,T)
    logits = torch.cat([judge(part) for part in rows.split(size)])  # the shape of `rows`
    return logits.float()[which].view(completions.shape)


def log_odds(judge, completions, words):
    """Score each hidden word by the judge's log-odds that it is from the text: -> (B,G,T).

    A well trained judge's log-odds of a word are log(p/q). Here p is the word's probability in real
    text, and q is its probability under the generator whose draws the judge learned from
    (model/losses.py). Every letter gets the score of its word, in nats, within ±8.
    """
    return mean_over_words(judge_logits(judge, completions), words).clamp(-SUREST, SUREST)


def judge_reward(judge, judge_score, completions, batch):
    """Return the log-odds or the probability that a word is real: -> (B,G,T)."""
    logits = log_odds(judge, completions, batch.words)  # (B,G,T)
    return logits if judge_score == "log_odds" else logits.sigmoid()


def valid_share(lexicon, completions, batch, cut=True):
    """Compute the share of an input's hidden words whose fill is in the lexicon: -> (B,G).

    This is the reward `valid_words`, and the metric of this name. It never sees the original text.
    A hidden word is whatever stands between two visible spaces, so a fill with a space in it is not
    valid. data/lexicon.py explains `cut`.
    """
    mask = batch.mask
    G = completions.shape[1]
    texts = decode(completions)
    letters = decode(completions[:, 0].masked_fill(mask, A_LETTER))
    blanks = mask.cpu().numpy()  # (B,T)
    shares = []
    for i, filled in enumerate(letters):
        spans = hidden_spans(filled, blanks[i], cut)
        for text in texts[i * G : (i + 1) * G]:
            valid = [is_valid(text, *span, lexicon) for span in spans]
            shares.append(sum(valid) / max(len(valid), 1))
    return torch.tensor(shares, device=mask.device).view(-1, G)


def own_reward(name, function, completions, batch):
    """Call a user's function: -> (B,G) or (B,G,T). If it fails, this raises a Mistake."""
    # The user's function gets copies, because it may write into them.
    own = (completions.clone(), batch.masked.clone(), batch.mask.clone())
    try:
        values = function(*own, decode)
        values = torch.as_tensor(values, dtype=torch.float32, device=completions.device).detach()
    except (Exception, SystemExit) as error:  # whatever the user's code may raise
        raise Mistake(f"reward {name} failed: {type(error).__name__}: {error}") from error
    whole, each = completions.shape[:2], completions.shape
    refuse(
        values.shape not in (whole, each),
        f"reward {name} returned the shape {tuple(values.shape)}; it must be (B, G) ="
        f" {tuple(whole)} or (B, G, T) = {tuple(each)}",
    )
    bad = int((~values.isfinite()).sum())
    refuse(bad, f"reward {name} returned {bad} numbers that are NaN or infinite; give finite ones")
    return values


class Rewards:
    """Compute the reward, a weighted sum of the parts that the setting `reward` names."""

    def __init__(self, parts):
        """Keep the parts of the reward, {name: (function, weight)}.

        Each function maps completions (B,G,T) and their `Batch` to (B,G) or (B,G,T).
        """
        self.parts = parts

    def __call__(self, fills, batch, credit):
        """Return the reward of each blank (B,G,T), and the numbers for the log, {name: (B,G)}.

        The reward is a weighted sum of parts. If a part returns one number for each completion,
        (B,G), every blank of the completion gets that number. If it returns a number for each
        letter, (B,G,T), a word gets the mean over its letters.

        `credit` concerns only the parts that return (B,G,T). With `credit=input` a blank gets the
        sum of the rewards of all words of the input. With `credit=word` it gets only the reward of
        its own word. This leaves out the noise of the other words' rewards. But it biases the
        gradient, because no word is credited for how it changes the judge's view of the other
        words.

        For the log we average each part over the blanks of a completion. The entry `reward` is the
        weighted sum of these averages.
        """
        reward = 0
        total = 0
        parts = {}
        for name, (function, weight) in self.parts.items():
            completions = fills.completions
            values = function(completions, batch)  # (B,G) or (B,G,T)
            if values.shape == completions.shape[:2]:
                mean = values  # (B,G)
                own = values[..., None].expand(completions.shape)  # (B,G,T)
            else:
                mean = mean_over_blanks(values, batch.mask)  # (B,G)
                own = mean_over_words(values, batch.words)  # (B,G,T)
                if credit == "input":
                    once = own * begins_word(batch.words)[:, None]  # (B,G,T) each word counts once
                    own = once.sum(dim=-1, keepdim=True).expand(completions.shape)  # (B,G,T)
            reward = reward + weight * own
            total = total + weight * mean
            parts[f"reward_{name}"] = mean
        return reward, {"reward": total} | parts
