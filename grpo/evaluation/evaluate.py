"""Measure in a table whether a run is really better than the base model.

The base model is the generator before GRPO. A higher reward alone proves nothing, because that's
what the run optimized. So the table has a referee, the rule, which on sums knows what's right and
never needs to be asked by the reward. Next to it stands what the judge accepts, and what you can
get without GRPO. config/README.md says what each row and column is.

Shapes: N held-out inputs, n completions of each, T characters.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from data.per_word import mean_over_blanks, same_word
from data.rules import check_gaps
from data.sums.rule import perfect_blanks
from data.vocabulary import decode, highlight
from grpo.evaluation.rivals import best_by_word, fill_in_passes, fill_with_common_words
from grpo.policy import Product
from grpo.reward import Rewards, accepts, fooled, log_odds
from grpo.run.load import SAMPLES, HeldOut, Models
from grpo.run.network import uncompiled

COLUMNS = {  # {the name in evaluation.json: (the title in the table, decimal places)}
    "right": ("right", 3),
    "valid_words": ("valid", 3),
    "exact": ("exact", 3),
    "accepts": ("accepts", 3),
    "fooled": ("fooled", 3),
    "distinct_words": ("distinct", 3),
    "different_right": ("in 16", 2),
    "different_valid_words": ("in 16", 2),
    "pass@16": ("pass@16", 3),
    "passes": ("passes", 2),
}
MUCH = 0.05  # if a judge accepts more than is right, by so much, we say that it's fooled


@dataclass
class Row:
    """A row of the table: how to make its completions (N,n,T), and in how many passes."""

    title: str
    complete: Callable[[], tuple[Tensor, float]]
    opinions: bool = False  # ask the judge, and rewards of the user's own


def measure(completions: Tensor, held_out: HeldOut) -> dict[str, float]:
    """Compute the figures of completions (N,n,T) that need no judge: -> {column: number}.

    right, valid_words   the share of gaps that are filled well, by the rule of the dataset
    different_...        of n > 1: the mean number of different good fills of a gap
    N blanks             sums: the share that's right of the inputs with so many blanks

    If only the hidden text is the answer we look for, there are three more:

    exact                the share of gaps, or without a rule of lines, filled with the hidden text
    distinct_words       how many different good words there are in one completion of all inputs,
                         for each different hidden word: the mean over the n completions
    pass@n               of n > 1: the share of inputs with a completion that has all blanks right
    """
    batch, rule = held_out.batch, held_out.rule
    n = completions.shape[1]
    same = (completions == batch.tokens[:, None]).all(dim=-1)  # (N,n)
    if not rule:
        return {"exact": same.float().mean().item()}
    mask = batch.mask.cpu().numpy()  # (N,T)
    texts = decode(completions)
    hidden = []  # what each gap hides
    good = []  # of each gap that is filled well: its number, that of the completion, and the text
    exact = 0
    blanks = {}  # sums: {how many blanks: [is it right?]}
    for i, original in enumerate(decode(batch.tokens)):
        for start, end in rule.gaps(original, mask[i]):
            for j, text in enumerate(texts[i * n : (i + 1) * n]):
                is_good = rule.is_good(text, start, end)
                if is_good:
                    good.append((len(hidden), j, text[start:end]))
                exact += text[start:end] == original[start:end]
                blanks.setdefault(int(mask[i].sum()), []).append(is_good)
            hidden.append(original[start:end])
    total = max(len(hidden), 1)  # avoids 0 / 0 if no whole word is hidden
    figures = {rule.name: len(good) / (total * n)}
    if n > 1:
        figures[f"different_{rule.name}"] = len({(gap, text) for gap, _, text in good}) / total
    if not rule.one_answer:
        return figures | {f"{k} blanks": sum(x) / len(x) for k, x in sorted(blanks.items())}
    figures["exact"] = exact / (total * n)
    distinct = {(j, text) for _, j, text in good}
    figures["distinct_words"] = len(distinct) / (max(len({*hidden}), 1) * n)
    if n > 1:
        figures[f"pass@{n}"] = same.any(dim=1).float().mean().item()
    return figures


def ask(
    models: Models, rewards: Rewards, completions: Tensor, held_out: HeldOut
) -> dict[str, Tensor]:
    """Ask the judge and the user's rewards about completions (N,n,T): -> {name: (N,n,T)}.

    `judge` are the judge's scores. Every other part of the reward that isn't the rule has its name.
    """
    batch = held_out.batch[: len(completions)]
    _, parts = rewards(completions, batch)
    if models.judge and "judge" not in parts:
        parts = {"judge": log_odds(models.judge, completions, batch.words)} | parts
    parts.pop(held_out.rule.name if held_out.rule else "", None)  # the rule has its own column
    return parts


def summarize(opinions: dict[str, Tensor], completions: Tensor, held_out: HeldOut) -> dict:
    """Average what `ask` returned: -> {column: number}."""
    batch, figures = held_out.batch, {}
    for name, part in opinions.items():
        if name == "judge":
            good, gaps = check_gaps(held_out.rule, completions, batch.tokens, batch.mask)
            figures["accepts"] = accepts(part, batch.words).mean().item()
            share = fooled(part, good, gaps)
            if share is not None:
                figures["fooled"] = share.item()
        else:
            figures[f"reward_{name}"] = mean_over_blanks(part, batch.mask).mean().item()
    return figures


def completion_lines(opinions: dict[str, Tensor], completions: Tensor, held_out: HeldOut) -> list:
    """List one dict for each completion (N,n,T): its input, its text, and the opinions of it."""
    masked = held_out.batch.masked[:, None].expand(completions.shape)  # (N,n,T)
    columns = {"input": decode(masked), "completion": decode(completions)}
    for name, part in opinions.items():
        mean = mean_over_blanks(part, held_out.batch.mask)  # (N,n)
        columns[name] = [round(x, 4) for x in mean.flatten().tolist()]
    return [dict(zip(columns, line)) for line in zip(*columns.values())]


def draw(q: Product) -> tuple[Tensor, float]:
    """Draw 16 completions of each input, in one pass: -> (N,16,T)."""
    return q.sample().completions, 1


def argmax(q: Product) -> tuple[Tensor, float]:
    """Fill in the most likely characters, in one pass: -> (N,1,T)."""
    return q.best_guess()[:, None], 1


def best_of_16_by_judge(q: Product, judge) -> tuple[Tensor, float]:
    """Let the judge choose among 16 draws, word by word: -> (N,1,T)."""
    completions, _ = draw(q)
    return best_by_word(q, completions, log_odds(judge, completions, q.batch.words)), 1


def best_of_16_by_rule(q: Product, rule) -> tuple[Tensor, float]:
    """Take the one of 16 draws with the most gaps filled well: -> (N,1,T)."""
    completions, _ = draw(q)
    good, _ = check_gaps(rule, completions, q.batch.tokens, q.batch.mask)  # (N,16,T)
    best = good.sum(dim=-1).argmax(dim=1).view(-1, 1, 1)  # (N,1,1)
    return completions.take_along_dim(best, dim=1), 1


def list_rows(models: Models, held_out: HeldOut, everything: bool) -> list[Row]:
    """List the rows of the table. `everything` adds those that take more than some seconds."""
    batch, rule = held_out.batch, held_out.rule
    base, policy = models.base(batch), models.policy(batch)
    rows = [
        Row("the truth", lambda: (batch.tokens[:, None], 0), opinions=True),
        Row("before, sampled", partial(draw, base), opinions=True),
        Row("before, argmax", partial(argmax, base)),
    ]
    if rule and rule.one_answer:
        cheat = partial(fill_with_common_words, batch, held_out.text)
        rows.append(Row("cheat: common words", lambda: (cheat(), 0)))
    rows.append(Row("after, sampled", partial(draw, policy), opinions=True))
    rows.append(Row("after, argmax", partial(argmax, policy)))
    if not everything:
        return rows
    if models.judge:
        rows.append(Row("best of 16, judge", partial(best_of_16_by_judge, base, models.judge)))
    if rule:
        rows.append(Row("best of 16, rule", partial(best_of_16_by_rule, base, rule)))
    in_passes = partial(fill_in_passes, models.base, batch, held_out.number_words)
    if rule and rule.one_answer:  # there are many blanks, so 16 draws would take minutes
        rows.append(Row("one by one, drawn", partial(in_passes, "random", n=1)))
        rows.append(Row("one by one, argmax", partial(in_passes, "confidence")))
        return rows
    for passes in (2, 3, 4, 6):
        fill = partial(in_passes, "confidence", passes, n=SAMPLES)
        rows.append(Row(f"by confidence, {passes} passes", fill))
    rows.append(Row("left to right, 2 passes", partial(in_passes, "left to right", 2, n=SAMPLES)))
    rows.append(Row("left to right, argmax", partial(in_passes, "left to right")))
    after = partial(fill_in_passes, models.policy, batch, held_out.number_words)
    rows.append(Row("after, 2 passes", partial(after, "confidence", 2, n=SAMPLES)))
    return rows


@torch.no_grad()
@uncompiled()
def evaluate(
    models: Models,
    rewards: Rewards,
    held_out: HeldOut,
    everything: bool = False,
    quiet: bool = False,
) -> tuple[dict, list]:
    """Compute the table: -> {a row's title: {column: number}}, and a dict for each completion.

    The second is for completions.jsonl. `everything` adds the rows that take long. With `quiet`
    there's no bar.
    """
    result, lines = {}, []
    one_answer = held_out.rule and held_out.rule.one_answer
    rows = list_rows(models, held_out, everything)
    for row in tqdm(rows, desc="table", leave=False, disable=True if quiet else None):
        completions, passes = row.complete()  # (N,n,T)
        figures = measure(completions, held_out)
        if row.opinions:
            # on text the judge is slow, so it reads only the first of the 16
            read = completions[:, :1] if one_answer and not everything else completions
            opinions = ask(models, rewards, read, held_out)
            figures |= summarize(opinions, read, held_out)
            lines = completion_lines(opinions, read, held_out)  # those of the last row stay
        if passes:
            figures["passes"] = passes
        result[row.title] = figures
    if held_out.rule and not one_answer:
        for name, figures in perfect_blanks(decode(held_out.batch.masked), SAMPLES).items():
            result[f"exact marginals, {name}"] = figures
    return result, lines


def try_out(models: Models, rewards: Rewards, held_out: HeldOut) -> None:
    """Try the table on two inputs, so that its errors show up before training."""
    few = replace(held_out, batch=held_out.batch[:2])
    evaluate(models, rewards, few, everything=True, quiet=True)


@torch.no_grad()
@uncompiled()
def peek(models: Models, held_out: HeldOut, step: int) -> str:
    """Say how good the policy is on held-out inputs, and show how it fills three of them.

    At step 0 the policy is the base model. The share is that of one draw of each input. The three
    have many blanks in a word, because those are the most likely to clash.
    """
    batch = held_out.batch
    completions = models.policy(batch).sample().completions[:, :1]  # (N,1,T)
    figures = measure(completions, held_out)
    name = held_out.rule.name if held_out.rule else "exact"
    line = f"step {step}: {COLUMNS[name][0]} {figures[name]:.3f}"
    if models.judge:
        accepted = accepts(log_odds(models.judge, completions, batch.words), batch.words).mean()
        line += f", the judge accepts {accepted:.3f}"
    pairs = same_word(batch.words).sum(dim=(1, 2))  # (N,) of blanks that could clash
    texts = {"now": decode(completions)}
    if step == 0:
        texts = {"truth": decode(batch.tokens), "before": texts["now"]}
    lines = [line]
    for i in pairs.argsort(descending=True, stable=True)[:3].tolist():
        blanks = batch.mask[i].tolist()
        lines += [f"  {name:7s}{highlight(each[i], blanks)}" for name, each in texts.items()]
    return "\n".join(lines)


def aligned(rows):
    """Pad the cells of each column to one width, and join each row into a line of text."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def cell(values, digits):
    """Format the mean of `values`, ± half of the gap between the largest and the smallest: -> str.

    No values give an empty cell. The ± is left out where it rounds to 0.
    """
    if not values:
        return ""
    mean = f"{sum(values) / len(values):.{digits}f}"
    half = f"{(max(values) - min(values)) / 2:.{digits}f}"
    return f"{mean} ± {half}" if float(half) else mean


def format_rows(rows):
    """Format {title: [the row of each run]}, with a `cell` for each column: -> lines of text.

    A column that COLUMNS doesn't have, as of a reward of the user's own, has its name as its title.
    """
    names = dict.fromkeys(name for runs in rows.values() for row in runs for name in row)
    known = [name for name in COLUMNS if name in names]
    columns = {name: COLUMNS[name] for name in known}
    columns |= {name: (name.removeprefix("reward_"), 3) for name in names if name not in columns}
    lines = [["filled by", *(title for title, _ in columns.values())]]
    for title, runs in rows.items():
        cells = []
        for name, (_, digits) in columns.items():
            cells.append(cell([row[name] for row in runs if name in row], digits))
        lines.append([title, *cells])
    return aligned(lines)


def format_table(result):
    """Format the dict of evaluation.json as a table: -> str."""
    lines = format_rows({title: [row] for title, row in result.items()})
    after = result["after, sampled"]
    good = after.get("right", after.get("valid_words"))
    if good is not None and after.get("accepts", 0) > good + MUCH:
        lines.append("the judge accepts much more than is right: it's being fooled")
    return "\n".join([*lines, "what the columns are: config/README.md#the-table"])
