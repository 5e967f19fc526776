"""Reward completions by a judge, a rule, a function of your own, or a weighted sum of these.

    --reward=judge                                                              the default
    --reward=correct                                                            is the sum correct?
    --reward=judge:0.5,model/pretrained/sums_judge_weak.pt:0.5                  two judges
    --reward=judge:1.0,my_rewards.py:even:0.1                                   and one of your own

Your own reward is a function of the completions (B,G,T) and their `Batch` (grpo/batch.py). It
returns (B,G), or (B,G,T) with a number for each character.
grpo/run/reward_setting.py reads the setting, and user_file.py beside it calls your function.

A judge is a model that maps tokens (N,T) to logits (N,T). The mean of a word's logits is how sure
it is, in log-odds, that the word is real and nobody filled it in.

Shapes: B masked inputs, T characters, G completions of each, N rows of tokens, D different texts.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from data.per_word import all_of_word, begins_word, distinct, mean_over_words
from data.rules import check_gaps
from grpo.batch import Batch

AT_ONCE = {"cpu": 32, "cuda": 4096}  # texts per batch; more overflow a CPU's cache, a GPU's memory
SUREST = 8  # nats; the score of a word is cut off at ±8
FEW = 20  # with fewer wrong completions, `fooled` would be noise


@torch.no_grad()
def judge_logits(judge: Callable, completions: Tensor) -> Tensor:
    """Ask the judge for the logit of every character: completions (B,G,T) -> (B,G,T).

    All batches have the same shape. On a CPU we judge equal completions only once. A GPU has judged
    all of them before a CPU could tell it which are equal.
    """
    B, G, _ = completions.shape
    if completions.is_cpu:
        texts, which = distinct(completions)  # (D,T), (B,G)
    else:
        texts = completions.flatten(0, 1)  # (B·G,T)
        which = torch.arange(B * G, device=texts.device).view(B, G)
    size = min(AT_ONCE[texts.device.type], B * G)
    texts = F.pad(texts, (0, 0, 0, -len(texts) % size))  # (multiple of size,T)
    logits = torch.cat([judge(part) for part in texts.split(size)])  # the shape of `texts`
    return logits.float()[which]  # (B,G,T)


def log_odds(judge: Callable, completions: Tensor, batch: Batch) -> Tensor:
    """Score each hidden word by the judge's log-odds that it's real: -> (B,G,T).

    A well trained judge scores a word by log(p/q_ref), where p is its probability in real text, and
    q_ref that under the generator whose draws the judge learned from (model/losses.py). It doesn't
    see what was hidden, so q_ref is an average over maskings. Every letter gets the score of its
    word, in nats, within ±8.
    """
    logits = judge_logits(judge, completions)  # (B,G,T)
    return mean_over_words(logits, batch.words).clamp(-SUREST, SUREST)


def accepts(scores: Tensor, words: Tensor) -> Tensor:
    """Compute the share of all hidden words that a judge accepts: (B,G,T), (B,T) -> ().

    It accepts a word with a score above 0. That's where it takes the word for real rather than
    filled in, which isn't the same as correct.
    """
    return (scores.mT[begins_word(words)] > 0).float().mean()


def judge_metrics(
    scores: Tensor,  # (B,G,T) the judge's
    words: Tensor,  # (B,T)
    good: Tensor,  # (B,G,T) what the rule says, from `check_gaps`
    gaps: Tensor,  # (B,T) from there, too
) -> dict[str, Tensor]:
    """Compute which share of all words the judge accepts, and which share of the wrong gaps.

    `accepts` counts `words`, because those have scores. In a text that's runs of blanks. `fooled`
    counts what the rule does: words of the text. Such a gap may have blanks of several runs, and
    the judge accepts it if all of them score above 0. A sum is one word and one gap. With hardly
    anything wrong, `fooled` is left out.
    """
    metrics = {"accepts": accepts(scores, words)}
    wrong = begins_word(gaps)[:, None] & ~good  # (B,G,T)
    if wrong.sum() >= FEW:
        metrics["fooled"] = all_of_word(scores > 0, gaps)[wrong].float().mean()
    return metrics


def rule_reward(rule, completions: Tensor, batch: Batch) -> Tensor:
    """Reward a completion with the share of its gaps that are filled well: -> (B,G)."""
    good, gaps = check_gaps(rule, completions, batch.tokens, batch.mask)
    return good.sum(dim=-1) / gaps.amax(dim=-1, keepdim=True).clamp(min=1)


class Rewards:
    """The reward: a weighted sum of the parts that the setting `reward` names."""

    def __init__(self, parts: dict[str, tuple[Callable, float]]):
        """Keep the parts, {name: (function, weight)}.

        A function maps completions (B,G,T) and their `Batch` to (B,G), or to (B,G,T) with a number
        for each character. The part called `judge` gives the scores of the run's judge.
        """
        self.parts = parts

    def __call__(self, completions: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the reward of each blank (B,G,T), and its parts {name: (B,G,T)} unweighted.

        One number for each completion goes to all of its blanks. Of one number for each character,
        a word gets the mean over its blanks, and those of visible characters don't count.
        """
        reward, parts = 0.0, {}
        for name, (function, weight) in self.parts.items():
            values = function(completions, batch)
            if values.shape == completions.shape[:2]:
                parts[name] = values[..., None].expand(completions.shape)
            else:
                parts[name] = mean_over_words(values, batch.words)
            reward = reward + weight * parts[name]
        return reward, parts
