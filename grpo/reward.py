"""Reward completions by a judge, a rule, a function of your own, or a weighted sum of these.

    --reward=judge                                                how real does it look?
    --reward=correct                                              is the sum correct? (a rule)
    --reward=exact                                                is it what was there?
    --reward=chain                                                what the base model finds likely
    --reward=judge:0.5,model/pretrained/sums_judge_weak.pt:0.5    two judges
    --reward=judge:1.0,my_rewards.py:even:0.1                     and one of your own

Each of these maps the completions (B,G,T) and their `Batch` (grpo/batch.py) to (B,G), your own
function, too. grpo/run/load.py reads the setting.

A judge is a model that maps tokens (N,T) to logits (N,T). The mean over what was blank is how sure
it is, in log-odds, that this is real and nobody filled it in.

Shapes: B masked inputs, T characters, G completions of each, N rows of tokens, D different texts.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.rules import Rule, check
from data.user_mistake import Mistake
from data.vocabulary import MASK_ID
from grpo.batch import Batch
from grpo.policy import Policy

JUDGE_BATCH = {
    "cpu": 32,
    "cuda": 4096,
}  # texts per batch; more overflow a CPU's cache, a GPU's memory
SCORE_LIMIT = 8  # nats; a score is cut off at ±8
MIN_WRONG = 20  # with fewer wrong completions, `fooled` would be noise


def distinct(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Find the different texts among tokens (...,T): -> (D,T), and which of them each is, (...).

    So texts[which] are the tokens again. A GPU has to wait for this.
    """
    T = tokens.shape[-1]
    rows = tokens.reshape(-1, T).to(torch.int8).cpu().contiguous().numpy()  # a byte per character
    # NumPy sorts whole rows of bytes, up to ten times as fast as torch.unique sorts numbers.
    _, first, which = np.unique(rows.view(f"V{T}"), return_index=True, return_inverse=True)
    texts = torch.from_numpy(rows[first]).to(tokens)  # (D,T)
    return texts, torch.from_numpy(which).view(tokens.shape[:-1]).to(tokens.device)


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
    size = min(JUDGE_BATCH[texts.device.type], B * G)
    texts = F.pad(texts, (0, 0, 0, -len(texts) % size))  # (multiple of size,T)
    logits = torch.cat([judge(part) for part in texts.split(size)])  # the shape of `texts`
    return logits.float()[which]  # (B,G,T)


def mean_over_blanks(x: Tensor, mask: Tensor) -> Tensor:
    """Average x over the blanks of each input: (B,G,T), (B,T) -> (B,G)."""
    return (x * mask[:, None]).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)[:, None]


def judge_scores(judge: Callable, completions: Tensor, batch: Batch) -> Tensor:
    """Score completions by the judge's log-odds that they're real: -> (B,G), in nats, within ±8.

    If the judge saw what was hidden, its best score would be log(p/q_ref), where p is the
    probability of a completion in real text, and q_ref that under the generator whose draws it
    learned from (model/losses.py). It doesn't, so its score is off. As far as right or wrong goes
    it's off by a constant of each input, which a comparison within the group removes.
    """
    logits = judge_logits(judge, completions)  # (B,G,T)
    return mean_over_blanks(logits, batch.mask).clamp(-SCORE_LIMIT, SCORE_LIMIT)


def judge_metrics(scores: Tensor, good: Tensor | None) -> dict[str, Tensor]:
    """Compute the share that the judge accepts: of all completions, and of those that aren't good.

    It accepts a score above 0. That's where it takes a completion for real rather than filled in,
    which isn't the same as correct. `good` (B,G) is what the rule says. Without one, or with hardly
    anything wrong, `fooled` is left out.
    """
    accepted = (scores > 0).float()  # (B,G)
    metrics = {"accepts": accepted.mean()}
    if good is not None and (~good).sum() >= MIN_WRONG:
        metrics["fooled"] = accepted[~good].mean()
    return metrics


def exact(completions: Tensor, batch: Batch) -> Tensor:
    """Reward a completion with 1 if it's just what was there, else 0: -> (B,G)."""
    return (completions == batch.tokens[:, None]).all(dim=-1).float()


@torch.no_grad()
def chain(reader: Policy, completions: Tensor, batch: Batch) -> Tensor:
    """Compute log p of completions, by a model that reads blank by blank: -> (B,G), in nats.

    From left to right, each blank is read with those before it filled in: by the chain rule,
    log p(y) = Σ_t log p(y_t | what's visible, y_1, ..., y_{t−1}). So here the blanks do see each
    other, at the price of a forward pass for each. Equal beginnings are read only once. The
    temperature is 1, whatever the policy's.
    """
    place = batch.mask.cumsum(dim=1) * batch.mask  # (B,T) 1 at an input's first blank, then 2, ...
    log_p = torch.zeros(completions.shape[:2], device=completions.device)  # (B,G)
    for number in range(1, int(place.max()) + 1):
        hidden = (place >= number)[:, None]  # (B,1,T)
        texts, which = distinct(completions.masked_fill(hidden, MASK_ID))  # (D,T), (B,G)
        log_q = reader(texts).log_marginals()  # (D,T,V)
        t = (place == number).int().argmax(dim=1)[:, None]  # (B,1) where that blank is
        y = completions.take_along_dim(t[..., None], dim=2)[..., 0]  # (B,G)
        there = (place == number).any(dim=1)[:, None]  # (B,1) not all inputs have so many blanks
        log_p += log_q[which, t, y].where(there, 0)
    return log_p


def rule_reward(rule: Rule, completions: Tensor, batch: Batch) -> Tensor:
    """Reward a completion with 1 if the rule calls it good, else 0: -> (B,G)."""
    return check(rule, completions, batch.masked).float()


def user_reward(path: str, function: Callable, completions: Tensor, batch: Batch) -> Tensor:
    """Call a user's function, which returns a number for each completion, (B,G)."""
    shape = tuple(completions.shape[:2])  # (B,G)
    returned = function(completions.clone(), batch)  # a copy, because it may write into it
    expected = f"return a number for each completion, here (B,G) = {shape}"
    try:
        values = torch.as_tensor(returned, dtype=torch.float32, device=completions.device).detach()
    except (TypeError, ValueError):  # texts, None, or rows of different lengths
        raise Mistake(f"the reward in {path} didn't return numbers; {expected}") from None
    if values.shape != shape:
        found = tuple(values.shape)
        raise Mistake(f"the reward in {path} returned the shape {found}; {expected}")
    return values


class Rewards:
    """The reward: a weighted sum of the parts that the setting `reward` names."""

    def __init__(self, parts: dict[str, tuple[Callable, float]]):
        """Keep the parts, {name: (function, weight)}.

        A function maps completions (B,G,T) and their `Batch` to (B,G). The part called `judge`
        gives the scores of the run's judge.
        """
        self.parts = parts

    def __call__(self, completions: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the reward (B,G), and its parts {name: (B,G)} unweighted."""
        reward, parts = 0.0, {}
        for name, (function, weight) in self.parts.items():
            parts[name] = function(completions, batch)  # (B,G)
            reward = reward + weight * parts[name]
        return reward, parts
