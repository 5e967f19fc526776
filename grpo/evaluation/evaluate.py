"""Measure in a table whether a run is really better than the base model.

The base model is the generator before GRPO. A higher reward alone proves nothing, because that's
what the run optimized. So the table has a referee, the rule, which on sums knows what's correct and
never needs to be asked by the reward. Next to it stands what the judge accepts, and what you can
get without GRPO. The rows:

    before, after: sampled, argmax   the base model or the policy in one pass; 16 draws or one guess
    before, τ = 0.3                  text: the base model's draws at a low temperature
    the truth                        what was there before it was hidden
    exact marginals                  sums: independent blanks with perfect probabilities, which is
                                     where pretraining would end
    cheat: common words              text: the most frequent word of each length, blindly
    left to right, right to left   * sums: the base model in two passes, half of the blanks each, or
                                     with one blank a pass
    the same, best reward of 16    * of those two-pass draws the one that earns the most
    one by one                     * text: one blank a pass, first the one that it's surest of

* needs `python -m grpo.evaluation out --again`. In several passes all but the last one draw, unless
it says argmax.

The columns:

    correct, valid     the share that the rule calls good: correct sums, words of the training text
    exact              text: the share that's just what was there
    distance           text: how far the words it writes are from those that were there
    chain              log p of the completion when the base model reads it blank by blank, in nats:
                       do the blanks agree?
    accepts, fooled    the share with a judge's score above 0: of all, and of what the rule rejects
                       (empty if that's fewer than 20)
    different_correct  different good completions among an input's 16
    pass@k             the share of inputs with a good one (text: an exact one) among k
    n blanks           what's good of the inputs with so many blanks

On sums, what the rule says of sampled rows is exact: log q is known, and all answers can be listed.
With --reward=judge,FILE.pt:0 there's the mean score of another judge, too.

Shapes: N held-out inputs, n completions of each, T characters.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from data.rules import WordRule, check
from data.user_mistake import Mistake
from data.vocabulary import PAD, decode, highlight
from grpo.batch import Batch
from grpo.evaluation import exact
from grpo.evaluation.rivals import fill_in_passes, fill_with_common_words
from grpo.metrics import mean_number_of_different
from grpo.policy import Product, at_temperature
from grpo.reward import Rewards, chain, distinct, judge_metrics, judge_scores
from grpo.run.load import SAMPLES, HeldOut, Models, uncompiled

JUDGED = 4  # the judge takes its time, so it reads only so many of an input's completions


def measure(completions: Tensor, held_out: HeldOut) -> dict[str, float]:
    """Compute the columns that need no judge, of completions (N,n,T): -> {column: number}."""
    batch, rule = held_out.batch, held_out.rule
    n = completions.shape[1]
    solved = (completions == batch.tokens[:, None]).all(dim=-1)  # (N,n)
    figures = {}
    if rule:
        good = check(rule, completions, batch.masked)  # (N,n)
        figures[rule.name] = good.float().mean()
    if held_out.answers is None:
        figures["exact"] = solved.float().mean()
        figures["distance"] = distance(completions, batch)
    else:
        solved = good
        if n > 1:
            _, which = distinct(completions)  # (N,n)
            figures["different_correct"] = mean_number_of_different(which.masked_fill(~good, -1))
        figures |= exact.means_by_blanks(good.float(), batch.mask)
    if n > 1:
        figures[f"pass@{n}"] = solved.any(dim=1).float().mean()
    return {name: float(x) for name, x in figures.items()}


def distance(completions: Tensor, batch: Batch) -> float:
    """Compute ½ Σ_w |f(w) − f*(w)|, with f a word's frequency, and f* that in the hidden text.

    A policy that writes its favorite words is far from the text, however good each of them is.
    """
    hidden = batch.mask[:, None].expand(completions.shape)  # (N,n,T)
    frequency = Counter()
    for tokens, weight in (completions, 1), (batch.tokens[:, None].expand(completions.shape), -1):
        words = decode(torch.where(hidden, tokens, PAD).flatten(0, 1))  # PAD is dropped at the end
        for word in words:
            frequency[word.replace("\0", "")] += weight / len(words)
    return sum(map(abs, frequency.values())) / 2


def score(models: Models, rewards: Rewards, completions: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Ask the judge and the reward's other judges and functions: (N,n,T) -> {name: (N,n)}.

    Parts of the reward that have a column anyway aren't asked again. A function may compare the
    completions of an input, so it gets each of them twice if there's only one.
    """
    N, n, _ = completions.shape
    several = completions.expand(N, max(n, 2), -1)
    batch = batch.first(max(n, 2))
    scores = {"judge": judge_scores(models.judge, completions, batch)} if models.judge else {}
    for name, (part, _) in rewards.parts.items():
        if name.endswith(".pt") or ".py:" in name:
            scores[name] = part(several, batch)[:, :n]
    return scores


def score_metrics(
    scores: dict[str, Tensor], completions: Tensor, held_out: HeldOut
) -> dict[str, float]:
    """Turn scores {name: (N,n)} into columns: the judge's `accepts` and `fooled`, others' mean."""
    rule = held_out.rule
    good = check(rule, completions, held_out.batch.masked) if rule else None  # (N,n)
    figures = {}
    for name, values in scores.items():
        if name == "judge":
            figures |= judge_metrics(values, good)
        else:
            figures[f"reward_{name}"] = values.mean()
    return {name: float(x) for name, x in figures.items()}


def rows(
    models: Models, rewards: Rewards, held_out: HeldOut, everything: bool
) -> Iterator[tuple[str, Tensor, float, Product | None]]:
    """Yield the rows: a title, completions (N,n,T), and how many passes they took.

    Where they were all drawn from one distribution, that comes last, and elsewhere None.
    `everything` adds the rows that take more than some seconds.
    """
    batch, rule = held_out.batch, held_out.rule
    base, policy = models.base(batch.masked), models.policy(batch.masked)
    drawn = {"before, sampled": base, "after, sampled": policy}
    if held_out.answers is None:
        drawn["before, τ = 0.3"] = at_temperature(base, 0.3)
    for title, q in drawn.items():
        yield title, q.sample(batch).completions, 1, q
    yield "the truth", batch.tokens[:, None], 0, None
    yield "before, argmax", base.best_guess()[:, None], 1, None
    yield "after, argmax", policy.best_guess()[:, None], 1, None
    if isinstance(rule, WordRule):
        yield "cheat: common words", fill_with_common_words(batch, rule.lexicon), 0, None
    if not everything:
        return
    if held_out.answers is None:
        yield "one by one, argmax", *fill_in_passes(models.base, batch, "confidence"), None
        return
    twice, passes = fill_in_passes(models.base, batch, "left to right", 2, SAMPLES)  # (N,16,T)
    yield "left to right, 2 passes", twice, passes, None
    reward, _ = rewards(twice, batch)  # (N,16)
    best = twice.take_along_dim(reward.argmax(dim=1)[:, None, None], dim=1)  # (N,1,T)
    yield "the same, best reward of 16", best, passes, None
    for title, most in ("right to left, 2 passes, argmax", 2), ("right to left, argmax", 0):
        yield title, *fill_in_passes(models.base, batch, "right to left", most), None


@torch.no_grad()
@uncompiled()
def evaluate(
    models: Models, rewards: Rewards, held_out: HeldOut, everything: bool = False
) -> tuple[dict[str, dict[str, float]], list[dict]]:
    """Compute the table, {a row's title: {column: number}}, and list what the policy drew.

    `everything` adds the rows that take long.
    """
    batch, answers = held_out.batch, held_out.answers
    result, drawn = {}, []
    for title, completions, passes, q in rows(models, rewards, held_out, everything):
        if q is None or answers is None or q.truncates:
            figures = measure(completions, held_out)
        else:
            figures = exact.figures(exact.probabilities(q, answers), batch.mask)
        few = completions[:, :JUDGED]  # (N,n,T)
        scores = score(models, rewards, few, batch)
        figures["chain"] = chain(models.reader, completions[:, :1], batch).mean().item()
        result[title] = figures | score_metrics(scores, few, held_out) | {"passes": passes}
        if title == "after, sampled":
            drawn = list_completions(batch, few, scores)
    if answers is not None:
        marginals = exact.marginals(answers, batch.mask)
        result["exact marginals"] = exact.figures(marginals, batch.mask)
    return result, drawn


def list_completions(batch: Batch, completions: Tensor, scores: dict[str, Tensor]) -> list[dict]:
    """List completions (N,n,T) and their scores, for a file of lines.

    There's one dict for each completion: its input, its text, and its scores.
    """
    masked = batch.masked[:, None].expand(completions.shape)  # (N,n,T)
    columns = {"input": decode(masked), "completion": decode(completions)}
    for name, values in scores.items():
        columns[name] = [round(x, 4) for x in values.flatten().tolist()]
    return [dict(zip(columns, line)) for line in zip(*columns.values())]


@torch.no_grad()
@uncompiled()
def peek(models: Models, rewards: Rewards, held_out: HeldOut, step: int) -> str:
    """Say how good the policy is on held-out inputs, and show how it fills three of them.

    At step 0 the policy is the base model. The share is that of one draw of each input. The three
    have the most blanks, because those are the most likely to clash.
    """
    batch = held_out.batch
    completions = models.policy(batch.masked).sample(batch.first(1)).completions  # (N,1,T)
    name = held_out.rule.name if held_out.rule else "exact"
    line = f"step {step}: {name} {measure(completions, held_out)[name]:.3f}"
    for name, scores in score(models, rewards, completions, batch).items():  # (N,1)
        if step == 0 and not scores.isfinite().all():
            raise Mistake(f"the reward {name} isn't finite; return finite numbers")
        if name == "judge":
            line += f", the judge accepts {(scores > 0).float().mean():.3f}"
        else:
            line += f", {name} {scores.mean():.3f}"
    texts = {"now": decode(completions)}
    if step == 0:
        texts = {"truth": decode(batch.tokens), "before": texts["now"]}
    lines = [line]
    for i in batch.mask.sum(dim=1).argsort(descending=True, stable=True)[:3].tolist():
        blanks = batch.mask[i].tolist()
        lines += [f"  {name:7s}{highlight(each[i], blanks)}" for name, each in texts.items()]
    return "\n".join(lines)
