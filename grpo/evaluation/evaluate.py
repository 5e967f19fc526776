"""Measure in a table whether a run is really better than the base model.

The base model is the generator before GRPO. A higher reward alone proves nothing, because the run
optimised it, and the default reward is the judge. The columns of the table prove more. But a lower
temperature alone improves most of them, so a run has to beat what the base model can do without
GRPO: its *argmax*, with a latent its draws with the *letters at 0*, where only the latent is
random, and its *best of 16*, where the judge chooses one of 16 draws for each word. Two rows are
cheats, which fill in words of the right length without a look at the context. No single column
gives both of them away. grpo/tweaking.md#the-table says what each row and column is.

Shapes: N held-out inputs, n fills of each, T characters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from data.per_word import mean_over_blanks, same_word
from data.sums.rule import perfect_blanks
from data.vocabulary import decode, highlight
from grpo.batch import Batch, make_batch
from grpo.evaluation.rivals import (
    best_by_word,
    fill_blank_by_blank,
    fill_with_common_words,
)
from grpo.reward import count_good, log_odds, of_completions
from grpo.run.network import uncompiled

EVALUATION_SEED = 2**31  # the same for all runs, and larger than any run's own seed
SAMPLES = 16  # how many fills of each input we draw for the table

COLUMNS = {  # {the name in evaluation.json: (the title in the table, decimal places)}
    "valid_words": ("valid", 3),
    "exact_words": ("exact", 3),
    "distinct_words": ("distinct", 3),
    "different_valid_words": ("in 16", 2),
    "pass@16": ("pass@16", 3),
    "right": ("right", 3),
    "different_right": ("in 16", 2),
    "passes": ("passes", 2),
}


@dataclass
class HeldOut:
    """Hold inputs that no run trains on, and the rule by which we measure fills."""

    batch: Batch  # N inputs, with the random numbers for 16 fills of each
    rule: object  # says which fills are good, see data/rules.py
    text: str  # the whole training split
    number_words: Callable  # maps tokens and a mask (N,T) to the number of each blank's word


def hold_out(config, val, rule, text, device, seed=EVALUATION_SEED):
    """Draw held-out inputs with the run's own masking: -> `HeldOut`.

    The inputs depend on settings and on `seed` alone, so runs with different seeds are measured on
    the same inputs. But each has random numbers of its own for the blanks, so that the spread of
    their figures includes the luck of the draws.
    """
    texts = val.batch(config.eval_inputs, config.masking, (seed, 0))  # each (N,T)
    batch = make_batch(*texts, SAMPLES, (seed, config.seed))
    return HeldOut(batch.map(lambda x: x.to(device)), rule, text, val.number_words)


def opinions(judge, rewards, fills, batch):
    """Ask the judge and the rewards about fills (N,n,T): -> {column: (N,n)}.

    The column of a judge is its probability that a word is real, averaged over the blanks of each
    fill. Each part of the reward that is not the run's judge has a column "reward_NAME".
    """
    said = {}
    if judge:
        p_real = log_odds(judge, fills, batch.words).sigmoid()  # (N,n,T)
        said["judge"] = mean_over_blanks(p_real, batch.mask)  # (N,n)
    for name, (function, _) in rewards.parts.items():
        if name not in ("judge", "valid_words", "right"):  # these have columns of their own
            values = function(fills, batch)  # (N,n) or (N,n,T)
            values = values.sigmoid() if name.endswith(".pt") else values
            said[f"reward_{name}"] = of_completions(values, fills, batch)
    return said


@uncompiled()
def try_rewards(judge, rewards, held_out):
    """Score two texts, so that a faulty reward fails before the run begins."""
    few = held_out.batch[:2]
    fills = few.tokens[:, None].repeat(1, 3, 1)  # (2,3,T)
    opinions(judge, rewards, fills, few)


def measure(fills, held_out):
    """Compute the figures of fills (N,n,T): -> {name: number}.

    valid_words, right     the share of gaps that are filled well, by the rule of the dataset
    different_...          if n > 1: the mean number of different good fills of a gap

    If only the hidden text is the answer that was looked for, there are three more:

    exact_words            the share of gaps that are filled with the hidden word
    distinct_words         the number of different valid words in one fill of all inputs, divided by
                           the number of different hidden words: the mean over the n fills
    pass@n                 if n > 1: the share of inputs that have a fill with all blanks right
    """
    n = fills.shape[1]
    batch, rule = held_out.batch, held_out.rule
    mask = batch.mask.cpu().numpy()  # (N,T)
    texts = decode(fills)
    hidden = []  # what each gap hides
    good = []  # of each gap that is filled well: its number, the number of the fill, and the word
    exact = 0
    for i, original in enumerate(decode(batch.tokens)):
        for start, end in rule.gaps(original, mask[i]):
            for j, text in enumerate(texts[i * n : (i + 1) * n]):
                exact += text[start:end] == original[start:end]
                if rule.is_good(text, start, end):
                    good.append((len(hidden), j, text[start:end]))
            hidden.append(original[start:end])
    total = max(len(hidden), 1)  # avoids 0 / 0 if no whole word is hidden
    distinct = {(j, word) for _, j, word in good}
    figures = {rule.name: len(good) / (total * n)}
    if n > 1:
        figures[f"different_{rule.name}"] = len({(gap, word) for gap, _, word in good}) / total
    if not rule.one_answer:
        return figures
    figures["exact_words"] = exact / (total * n)
    figures["distinct_words"] = len(distinct) / (max(len({*hidden}), 1) * n)
    if n > 1:
        right = (fills == batch.tokens[:, None]).all(dim=-1)  # (N,n) visible text is always right
        figures[f"pass@{n}"] = right.any(dim=1).float().mean().item()
    return figures


def completion_lines(fills, said, held_out):
    """Make one dict for each fill: fills (N,n,T), said {name: (N,n)} -> a list of dicts.

    `said` is what the judge and the rewards said of the fills: one number per fill under each name.
    A dict holds the input of a fill, its text, and these numbers.
    """
    masked = held_out.batch.masked[:, None].expand(fills.shape)  # (N,n,T)
    columns = {"input": decode(masked), "completion": decode(fills)}
    for name, values in said.items():
        columns[name] = [round(x, 6) for x in values.flatten().tolist()]
    return [dict(zip(columns, line)) for line in zip(*columns.values())]


def draws(q):
    """Draw 16 fills of each input: -> (N,16,T)."""
    return q.sample().completions


def argmax(q):
    """Fill in the likeliest letters: -> (N,1,T)."""
    return q.best_guess()[:, None]


def best_of_draws(q, judge, held_out):
    """Choose the best of 16 draws: -> (N,1,T).

    The judge chooses word by word. Without a judge, the rule says which draw has the most good
    gaps.
    """
    fills = draws(q)  # (N,16,T)
    if judge:
        return best_by_word(q, fills, log_odds(judge, fills, q.batch.words))
    good, _ = count_good(held_out.rule, fills, q.batch)  # (N,16)
    best = good.argmax(dim=1).view(-1, 1, 1)  # (N,1,1)
    return fills.take_along_dim(best, dim=1)


def table_rows(models, held_out, config, everything):
    """List the rows of the table: -> {title: a function that returns fills (N,n,T)}.

    `everything` adds the rows that take more than some seconds, those that ask the judge about many
    fills or fill one blank after the other.
    """
    batch = held_out.batch
    before, after = models.base(batch), models.policy(batch)
    rows = {
        "the text": lambda: batch.tokens[:, None],
        "before, sampled": lambda: draws(before),
        "before, argmax": lambda: argmax(before),
    }
    if held_out.rule.one_answer:
        rows["cheat: common words"] = lambda: fill_with_common_words(batch, held_out.text)
    rows["after, sampled"] = lambda: draws(after)
    rows["after, argmax"] = lambda: argmax(after)
    if everything:
        one_by_one = partial(
            fill_blank_by_blank, models.base, batch, held_out.number_words, config.seed
        )
        rows["before, best of 16"] = lambda: best_of_draws(before, models.judge, held_out)
        n = 1 if held_out.rule.one_answer else SAMPLES  # on text 16 draws would take minutes
        rows["one by one, drawn"] = partial(one_by_one, n=n)
        rows["one by one, surest"] = partial(one_by_one, surest=True)
    return rows


@torch.no_grad()
@uncompiled()
def evaluate(models, rewards, held_out, config, everything=False, quiet=False):
    """Compute the table: -> result, lines.

    `result` is {a row's title: {a column's name: number}}, for evaluation.json. `lines` is the list
    of dicts for completions.jsonl. The policies of `models` map a batch to a distribution over its
    fills. `everything` adds the rows that take long, and lets the judge read all fills of the
    others, and not only the first one of each input. With `quiet` there is no bar.
    """
    result = {}
    rows = table_rows(models, held_out, config, everything).items()
    for title, fill in tqdm(rows, desc="table", leave=False, disable=True if quiet else None):
        fills = fill()  # (N,n,T)
        result[title] = measure(fills, held_out)
        if title.startswith("one by one"):
            result[title]["passes"] = held_out.batch.mask.sum(dim=1).float().mean().item()
        if title in ("the text", "before, sampled", "after, sampled"):
            read = fills if everything else fills[:, :1]
            said = opinions(models.judge, rewards, read, held_out.batch)
            result[title] |= {name: values.mean().item() for name, values in said.items()}
        if title == "after, sampled":
            lines = completion_lines(read, said, held_out)
    if not held_out.rule.one_answer:
        for name, figures in perfect_blanks(decode(held_out.batch.masked), SAMPLES).items():
            result[f"perfect independent blanks, {name}"] = figures
    return result, lines


@torch.no_grad()
@uncompiled()
def peek(policy, held_out, step):
    """Show how the policy, which is the base model at step 0, fills three held-out texts.

    The first line has the share of good fills in all held-out texts, as in the table. The three
    texts have many long hidden words, because the blanks of a long word are the likeliest to clash.
    """
    batch = held_out.batch
    fills = draws(policy(batch))  # (N,16,T)
    good, gaps = count_good(held_out.rule, fills, batch)  # (N,16), (N,)
    share = good.sum().item() / max(gaps.sum().item() * SAMPLES, 1)
    pairs = same_word(batch.words).sum(dim=(1, 2))  # (N,) of blanks that could clash
    shown = pairs.argsort(descending=True, stable=True)[:3].tolist()
    texts = {"now": decode(fills[:, 0])}
    if step == 0:
        texts = {"text": decode(batch.tokens), "before": texts["now"]}
    lines = [f"step {step}: {held_out.rule.title} {share:.3f}"]
    for i in shown:
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

    Each part of a run's reward except `judge` adds a column, named "reward_NAME" in the rows.
    """
    names = dict.fromkeys(name for of_runs in rows.values() for row in of_runs for name in row)
    parts = {name: (name.removeprefix("reward_"), 3) for name in names if "reward_" in name}
    columns = COLUMNS | ({"judge": ("judge", 3)} if parts else {}) | parts
    columns = {name: column for name, column in columns.items() if name in names}
    lines = [["filled by", *(title for title, _ in columns.values())]]
    for title, of_runs in rows.items():
        cells = []
        for name, (_, digits) in columns.items():
            values = [row[name] for row in of_runs if name in row]
            cells.append(cell(values, digits))
        lines.append([title, *cells])
    return aligned(lines)


def format_table(result):
    """Format the dict of evaluation.json as a table: -> str."""
    lines = format_rows({title: [row] for title, row in result.items()})
    if result["after, sampled"].get("judge", 0) > result["the text"].get("judge", 1):
        lines.append("the judge prefers these fills to the original text: it is being fooled")
    return "\n".join([*lines, "what the columns are: grpo/tweaking.md#the-table"])
