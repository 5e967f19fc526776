"""Reward fills by a judge, a rule, a function of your own, or a weighted sum of these.

    --reward=judge                                                              the default
    --reward=judge:1.0,valid_words:0.5,my_rewards.py:no_double_space:0.1
    --reward=judge:0.5,model/pretrained/judge_naive.pt:0.5                      two judges

Your own reward is a function of completions (B,G,T), the masked inputs (B,T) and mask (B,T) bool,
True at the blanks. `decode` turns any (...,T) tokens into a flat list of strings. If it has a
parameter `words`, it gets the number of each blank's word (B,T), 0 where no blank is.

    reward(completions, masked, mask, decode) -> (B,G), or (B,G,T) with a number for each character

grpo/run/reward_setting.py reads the setting, and user_file.py beside it calls your function.

A judge is a model that maps tokens (N,T) to logits (N,T). The mean of a word's logits is the
judge's log-odds that the word stood in the text and was not filled in.

Shapes: B masked inputs, T characters, G completions of each, N rows of tokens, D rows without
repeats.
"""

import torch
import torch.nn.functional as F

from data.per_word import mean_over_blanks, mean_over_words
from data.vocabulary import decode

ROWS = {"cpu": 32, "cuda": 256}  # rows that are judged at once; more would overflow a CPU's cache
SUREST = 8  # nats; the score of a word is cut off at ±8


@torch.no_grad()
def judge_logits(judge, completions):
    """Ask the judge for the logit of every character: completions (B,G,T) -> (B,G,T).

    We judge equal completions only once, in batches that all have the same shape.
    """
    rows, which = completions.flatten(0, 1).unique(dim=0, return_inverse=True)  # (D,T), (B·G,)
    size = min(ROWS[rows.device.type], len(which))
    rows = F.pad(rows, (0, 0, 0, -len(rows) % size))  # (multiple of size,T)
    logits = torch.cat([judge(part) for part in rows.split(size)])  # the shape of `rows`
    return logits.float()[which].view(completions.shape)


def log_odds(judge, completions, words):
    """Score each hidden word by the judge's log-odds that it is from the text: -> (B,G,T).

    A well trained judge's log-odds of a word are log(p/q_ref). Here p is the word's probability in
    real text, and q_ref is its probability under the generator whose draws the judge learned from
    (model/losses.py). Every letter gets the score of its word, in nats, within ±8.
    """
    return mean_over_words(judge_logits(judge, completions), words).clamp(-SUREST, SUREST)


def judge_reward(judge, completions, batch):
    """Reward each letter with the judge's log-odds that its word is real: -> (B,G,T)."""
    return log_odds(judge, completions, batch.words)


def count_good(rule, completions, batch):
    """Count the gaps that each completion fills well, and all gaps of each input.

    rule (data/rules.py), completions (B,G,T) -> (B,G), (B,)
    """
    G = completions.shape[1]
    fills = decode(completions)
    masks = batch.mask.cpu().numpy()  # (B,T)
    good, gaps = [], []
    for i, original in enumerate(decode(batch.tokens)):
        here = rule.gaps(original, masks[i])
        gaps.append(len(here))
        for fill in fills[i * G : (i + 1) * G]:
            good.append(sum(rule.is_good(fill, *gap) for gap in here))
    device = completions.device
    return torch.tensor(good, device=device).view(-1, G), torch.tensor(gaps, device=device)


def rule_reward(rule, completions, batch):
    """Reward a completion with the share of its gaps that are filled well: -> (B,G)."""
    good, gaps = count_good(rule, completions, batch)  # (B,G), (B,)
    return good / gaps[:, None].clamp(min=1)


class Rewards:
    """Compute the reward, a weighted sum of the parts that the setting `reward` names."""

    def __init__(self, parts):
        """Keep the parts of the reward, {name: (function, weight)}.

        Each function maps completions (B,G,T) and their `Batch` to (B,G) or (B,G,T).
        """
        self.parts = parts

    def __call__(self, fills, batch):
        """Return the reward of each blank (B,G,T), and the numbers for the log, {name: (B,G)}.

        The reward is a weighted sum of parts. For the log we average each part over the blanks of a
        completion. The entry `reward` is the weighted sum of these averages.
        """
        reward = 0
        mean_reward = 0
        means = {}
        for name, (function, weight) in self.parts.items():
            values = function(fills.completions, batch)  # (B,G) or (B,G,T)
            reward = reward + weight * of_blanks(values, fills.completions, batch)
            means[f"reward_{name}"] = of_completions(values, fills.completions, batch)
            mean_reward = mean_reward + weight * means[f"reward_{name}"]
        return reward, {"reward": mean_reward} | means


def of_blanks(values, completions, batch):
    """Give each blank its part of the reward: (B,G) or (B,G,T) -> (B,G,T).

    One number for each completion goes to all of its blanks. Of one number for each letter, a word
    gets the mean over its letters.
    """
    if values.shape == completions.shape[:2]:
        return values[..., None].expand(completions.shape)
    return mean_over_words(values, batch.words)  # (B,G,T)


def of_completions(values, completions, batch):
    """Average over the blanks of each completion: (B,G) or (B,G,T) -> (B,G)."""
    if values.shape == completions.shape[:2]:
        return values
    return mean_over_blanks(values, batch.mask)
