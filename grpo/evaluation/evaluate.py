"""Measure in a table whether a run is really better than the base model.

The base model is the generator before GRPO. A higher reward alone proves nothing, because that's
what the run optimized. So the table has a referee, the rule, which on sums knows what's correct and
never needs to be asked by the reward. Next to it stands what the judge accepts, and what you can
get without GRPO. config/README.md says what each row and column is.

Shapes: N held-out inputs, n completions of each, T characters.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from data.per_word import all_of_word, begins_word, distinct, mean_over_blanks
from data.rules import RULES, Rule, WordRule, check_gaps
from data.vocabulary import decode, highlight
from grpo.batch import Batch
from grpo.evaluation import exact
from grpo.evaluation.rivals import best_by_word, fill_in_passes, fill_with_common_words
from grpo.metrics import mean_number_of_different
from grpo.reward import Rewards, judge_metrics, log_odds
from grpo.run.load import SAMPLES, HeldOut, Models
from grpo.run.network import uncompiled
from grpo.run.reward_setting import parse_reward
from grpo.truncation import truncates

TITLES = {  # {the name in evaluation.json: the title in the table}; other columns come after these
    **{rule.name: rule.title for rule in RULES},
    "exact": "exact",
    "accepts": "accepts",
    "fooled": "fooled",
    "different_correct": "different",
    "pass@16": "pass@16",
    "pass@1024": "pass@1024",
    "passes": "passes",
}
MUCH = 0.05  # if a judge accepts more than is correct, by so much, we say that it's fooled


def measure(
    completions: Tensor, held_out: HeldOut, opinions: dict[str, Tensor] | None = None
) -> dict[str, float]:
    """Compute the figures of completions (N,n,T): -> {column: number}.

    correct, valid_words the share of gaps that are filled well, by the rule of the dataset
    different_correct    sums, n > 1: how many different correct completions an input has
    N blanks             sums: the share that's correct of the inputs with so many blanks
    exact                anything else: the share of gaps that came back as they were; without a
                         rule, that of hidden words
    pass@n               n > 1: the share of inputs with a completion that has everything correct
    accepts, fooled      the share of hidden words that the judge accepts, and of wrong gaps
    reward_...           the mean of any other part of the reward

    `opinions`, from `ask`, may leave out some of the n completions.
    """
    batch, rule = held_out.batch, held_out.rule
    good, gaps = check_gaps(rule, completions, batch.tokens, batch.mask)  # (N,n,T), (N,T)
    n = completions.shape[1]
    figures = {}
    if rule:
        figures[rule.name] = good.sum() / (gaps.amax(dim=1).sum() * n).clamp(min=1)
    if rule and rule.whole:
        solved = good.any(dim=-1)  # (N,n)
        if n > 1:
            _, which = distinct(completions)  # (N,n)
            counted = which.masked_fill(~solved, -1)  # (N,n)
            figures["different_correct"] = mean_number_of_different(counted)
        blanks = batch.mask.sum(dim=1)  # (N,)
        for number in blanks.unique().tolist():
            figures[f"{number} blanks"] = solved[blanks == number].float().mean()
    else:
        same = completions == batch.tokens[:, None]  # (N,n,T)
        solved = same.all(dim=-1)  # (N,n)
        words = gaps if rule else batch.words  # (N,T)
        first = begins_word(words)  # (N,T)
        whole = all_of_word(same, words) & first[:, None]  # (N,n,T)
        figures["exact"] = whole.sum() / (first.sum() * n).clamp(min=1)
    if n > 1:
        figures[f"pass@{n}"] = solved.any(dim=1).float().mean()
    for name, part in (opinions or {}).items():
        if name == "judge":
            figures |= judge_metrics(part, batch.words, good[:, : part.shape[1]], gaps)
        else:
            figures[f"reward_{name}"] = mean_over_blanks(part, batch.mask).mean()
    return {name: float(x) for name, x in figures.items()}


def read_by_judge(rule: Rule | None) -> int:
    """Return how many completions of an input the judge reads, because it takes its time."""
    return 4 if rule and rule.whole else 2


def ask(
    models: Models, rewards: Rewards, completions: Tensor, held_out: HeldOut
) -> dict[str, Tensor]:
    """Ask the judge and the user's rewards about completions (N,n,T): -> {name: (N,n,T)}.

    `judge` are the judge's scores. Every other part of the reward that isn't the rule has its name.
    The judge reads only the first few of the n completions.
    """
    batch, rule = held_out.batch, held_out.rule
    completions = completions[:, : read_by_judge(rule)]
    _, parts = rewards(completions, batch)
    if models.judge and "judge" not in parts:
        parts = {"judge": log_odds(models.judge, completions, batch)} | parts
    return {name: part for name, part in parts.items() if not rule or name != rule.name}


def table_rows(
    models: Models, held_out: HeldOut, everything: bool
) -> Iterator[tuple[str, Tensor, float]]:
    """Yield the rows of the table: a title, completions (N,n,T), and how many passes they took.

    `everything` adds those that take more than some seconds.
    """
    batch, rule = held_out.batch, held_out.rule
    base, policy = models.base(batch), models.policy(batch)
    yield "the truth", batch.tokens[:, None], 0
    yield "before, sampled", base.sample().completions, 1
    yield "before, argmax", base.best_guess()[:, None], 1
    if isinstance(rule, WordRule):
        yield "cheat: common words", fill_with_common_words(batch, rule.lexicon), 0
    yield "after, sampled", policy.sample().completions, 1
    yield "after, argmax", policy.best_guess()[:, None], 1
    if not everything:
        return
    if models.judge:
        completions = base.sample().completions  # (N,n,T)
        scores = log_odds(models.judge, completions, batch)  # (N,n,T)
        yield "best of 16, judge", best_by_word(base, completions, scores), 1
    fill = partial(fill_in_passes, models.base, batch)
    if not (rule and rule.whole):  # there are many blanks, so 16 draws would take minutes
        yield "one by one, argmax", *fill("confidence")
        return
    for passes in (2, 3, 4, 6):
        yield f"by confidence, {passes} passes", *fill("confidence", passes, SAMPLES)
    yield "left to right, 2 passes", *fill("left to right", 2, SAMPLES)
    yield "left to right, argmax", *fill("left to right")
    yield "after, 2 passes", *fill_in_passes(models.policy, batch, "confidence", 2, SAMPLES)


@torch.no_grad()
@uncompiled()
def evaluate(
    models: Models,
    rewards: Rewards,
    held_out: HeldOut,
    everything: bool = False,
    quiet: bool = False,
) -> tuple[dict[str, dict[str, float]], list[dict]]:
    """Compute the table, {a row's title: {column: number}}, and list what the policy drew.

    `everything` adds the rows that take long. With `quiet` there's no bar.
    """
    result, asked = {}, {}
    rows = table_rows(models, held_out, everything)
    for title, completions, passes in tqdm(
        rows, desc="table", leave=False, disable=True if quiet else None
    ):
        opinions = ask(models, rewards, completions, held_out)
        result[title] = measure(completions, held_out, opinions) | {"passes": passes}
        asked[title] = completions, opinions
    if hasattr(held_out.rule, "answers"):
        q = exact.marginals(held_out.answers, held_out.batch.mask)
        result["exact marginals"] = exact.figures(q, held_out.batch.mask)
        for title, policy in (("before", models.base), ("after", models.policy)):
            distribution = policy(held_out.batch)
            if not truncates(distribution.config):  # then exact figures replace those of the draws
                q = exact.probabilities(distribution, held_out.answers)
                result[f"{title}, sampled"] |= exact.figures(q, held_out.batch.mask)
    return result, list_completions(held_out, *asked["after, sampled"])


def list_completions(
    held_out: HeldOut, completions: Tensor, opinions: dict[str, Tensor]
) -> list[dict]:
    """List completions (N,16,T), and what the judge and others think of them, for a file of lines.

    There's one dict for each completion that they read: its input, its text, and the opinions.
    """
    batch = held_out.batch
    completions = completions[:, : read_by_judge(held_out.rule)]  # (N,n,T)
    masked = batch.masked[:, None].expand(completions.shape)  # (N,n,T)
    columns = {"input": decode(masked), "completion": decode(completions)}
    for name, part in opinions.items():
        mean = mean_over_blanks(part, batch.mask)  # (N,n)
        columns[name] = [round(x, 4) for x in mean.flatten().tolist()]
    return [dict(zip(columns, line)) for line in zip(*columns.values())]


@torch.no_grad()
@uncompiled()
def try_out(models: Models, rewards: Rewards, held_out: HeldOut, first: Batch) -> None:
    """Try the table on two inputs, so that its errors show up before training.

    And try the reward on the `first` inputs with any characters in their blanks, because that's
    what it gets to see.
    """
    few = replace(held_out, batch=held_out.batch[:2])
    evaluate(models, rewards, few, everything=True, quiet=True)
    generator = models.base.network
    noise = first.noise(SAMPLES, first.mask.shape[1])  # (B,16,T)
    anything = (noise * (generator.vocab_size - 1)).long()  # (B,16,T)
    anything = anything + (anything >= generator.blank)  # leave out the blank: nobody draws it
    rewards(torch.where(first.mask[:, None], anything, first.tokens[:, None]), first)


@torch.no_grad()
@uncompiled()
def peek(models: Models, held_out: HeldOut, step: int) -> str:
    """Say how good the policy is on held-out inputs, and show how it fills three of them.

    At step 0 the policy is the base model. The share is that of one draw of each input. The three
    have the most blanks, because those are the most likely to clash.
    """
    batch = held_out.batch
    once = replace(batch, uniforms=batch.uniforms[:, :1])
    completions = models.policy(once).sample().completions  # (N,1,T)
    opinions = {"judge": log_odds(models.judge, completions, batch)} if models.judge else {}
    figures = measure(completions, held_out, opinions)
    name = held_out.rule.name if held_out.rule else "exact"
    line = f"step {step}: {TITLES[name]} {figures[name]:.3f}"
    if models.judge:
        line += f", the judge accepts {figures['accepts']:.3f}"
    texts = {"now": decode(completions)}
    if step == 0:
        texts = {"truth": decode(batch.tokens), "before": texts["now"]}
    lines = [line]
    for i in batch.mask.sum(dim=1).argsort(descending=True, stable=True)[:3].tolist():
        blanks = batch.mask[i].tolist()
        lines += [f"  {name:7s}{highlight(each[i], blanks)}" for name, each in texts.items()]
    return "\n".join(lines)


def aligned(rows: list[list[str]]) -> list[str]:
    """Pad the cells of each column to one width, and join each row into a line of text."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def cell(values: list[float], runs: int) -> str:
    """Format the mean of `values`, ± half of the gap between the largest and the smallest.

    No values give an empty cell. The ± is left out where it rounds to 0. If not all of the runs
    have a value, the cell says how many do.
    """
    if not values:
        return ""
    mean = f"{sum(values) / len(values):.3f}"
    half = f"{(max(values) - min(values)) / 2:.3f}"
    some = "" if len(values) == runs else f" ({len(values)} of {runs})"
    return (f"{mean} ± {half}" if float(half) else mean) + some


def format_rows(rows: dict[str, list[dict[str, float]]]) -> list[str]:
    """Format {title: [the row of each run]}, with a `cell` for each column: -> lines of text.

    A title may have several lines.
    """
    names = dict.fromkeys(name for runs in rows.values() for row in runs for name in row)
    names = [name for name in TITLES if name in names] + [n for n in names if n not in TITLES]
    lines = [["filled by", *(TITLES.get(name, name.removeprefix("reward_")) for name in names)]]
    for title, runs in rows.items():
        cells = [cell([row[name] for row in runs if name in row], len(runs)) for name in names]
        *above, last = title.split("\n")
        lines += [[each, *[""] * len(cells)] for each in above]
        lines.append([last, *cells])
    return aligned(lines)


def format_table(result: dict[str, dict[str, float]], reward: str) -> str:
    """Format the dict of evaluation.json as a table, of a run with this setting `reward`."""
    lines = format_rows({title: [row] for title, row in result.items()})
    after = result["after, sampled"]
    good = next((after[rule.name] for rule in RULES if rule.name in after), None)
    paid = "judge" in parse_reward(reward)
    if paid and good is not None and after.get("accepts", 0) > good + MUCH:
        lines.append("the judge accepts much more than is correct: it's being fooled")
    return "\n".join([*lines, "what the columns are: config/README.md#the-table"])
