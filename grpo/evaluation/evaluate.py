"""Measure in a table whether a run is really better than the base model.

The base model is the generator before GRPO. A higher reward alone proves nothing, because the run
optimised it. The default reward is the judge, so then the column `judge` proves nothing either. The
other columns prove more. But a lower temperature alone raises most of them, too. So a run has to
beat what the base model can do without GRPO. We show the base model's *argmax*, its draws at lower
temperatures, and its *best of 16*, where the judge chooses one of 16 draws for each word. One row
is a cheat. It fills each hidden word with the most frequent word of its length.
grpo/README.md#the-table says what each row and column is.

Shapes: N held-out inputs, n fills of each, T characters, V vocabulary.
"""

from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import torch
from tqdm import tqdm

from data.dataset import decode
from data.lexicon import hidden_spans, highlight, is_valid, lexicon
from data.masking import parse_masking
from data.per_word import mean_over_blanks, sum_over_words
from grpo.batch import Batch, make_batch
from grpo.distributed import is_first
from grpo.evaluation.ngram import ngram, ngram_bits
from grpo.evaluation.rivals import best_by_word, fill_blank_by_blank, most_frequent_words
from grpo.logprobs import expectation, log_softmax
from grpo.reward import log_odds

EVALUATION_SEED = 2**31  # the same for all runs, and larger than any run's own seed
SAMPLES = 16  # how many fills of each input we draw for the table
PEEK = 64  # inputs that `peek` looks at during a run
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)  # we draw from the base model at each of these

ROWS = {  # {the row's name in evaluation.json: its title}
    "original": "original text",
    "before_sample": "before, sampled",
    "before_argmax": "before, argmax",
    "before_best_of_16": "before, best of 16",
    "after_sample": "after, sampled",
    "after_argmax": "after, argmax",
    "reference_sequential_random": "one by one, drawn",
    "reference_sequential_confident": "one by one, surest",
    "most_frequent": "cheat: common words",
    "before_at_temperatures": "before, temperature {temperature}",
}
COLUMNS = {
    "judge": "judge",
    "valid_words": "valid",
    "exact_words": "exact",
    "distinct_words": "distinct",
    "ngram_bits": "bits",
    "entropy": "entropy",
    "pass@16": "pass@16",
    "different_valid_words": "words in 16",
    "forward_passes": "passes",
}
# A run prints these rows and columns when it ends, because they fit into 80 characters.
SHORT_ROWS = [
    "original",
    "before_sample",
    "before_argmax",
    "before_best_of_16",
    "after_sample",
    "after_argmax",
    "reference_sequential_random",
    "reference_sequential_confident",
    "most_frequent",
]
SHORT_COLUMNS = [
    "valid_words",
    "exact_words",
    "distinct_words",
    "ngram_bits",
    "different_valid_words",
    "forward_passes",
]


@dataclass
class HeldOut:
    """This holds held-out inputs, and the text and lexicon by which we measure their fills."""

    batch: Batch  # N inputs, with the random numbers for 16 fills of each
    vocabulary: str
    text: str  # the whole training split
    lexicon: set


def hold_out(config, train, val, device, seed=EVALUATION_SEED):
    """Draw held-out inputs with the run's own masking. They depend on settings and `seed` alone."""
    N, T = config.eval_inputs, config.block_size
    masking = parse_masking(config.masking)
    texts = val.batch(N, T, masking, config.mask_ratio, config.hidden_words, (seed, 0))
    batch = make_batch(*texts, train.mask_id, SAMPLES, (seed,)).map(lambda x: x.to(device))
    text = train.decode(train.tokens)
    return HeldOut(batch, train.vocabulary, text, lexicon(text))


def opinions(judge, rewards, fills, batch):
    """Ask the judge and the rewards about fills (N,n,T): -> scores (N,n,T), {column: (N,n)}.

    A blank's score is the judge's log-odds that its word is from the text. For the column "judge"
    we turn these scores into probabilities, and average them over the blanks of each fill. Each
    part of the reward that is not the judge has a column "reward_NAME".
    """
    scores = log_odds(judge, fills, batch.words)  # (N,n,T)
    said = {"judge": mean_over_blanks(scores.sigmoid(), batch.mask)}  # (N,n)
    for name, (function, _) in rewards.parts.items():
        if name != "judge":
            values = function(fills, batch, rewards.decode)  # (N,n) or (N,n,T)
            whole = values.shape == fills.shape[:2]
            said[f"reward_{name}"] = values if whole else mean_over_blanks(values, batch.mask)
    return scores, said


@torch.compiler.set_stance("force_eager")
def try_rewards(judge, rewards, held_out):
    """Score a few texts, so that a faulty reward fails before the run begins."""
    few = held_out.batch[:2]
    fills = few.tokens[:, None].repeat(1, 3, 1)  # (2,3,T)
    opinions(judge, rewards, fills, few)


def measure(fills, inputs):
    """Compute the figures of fills (N,n,T) of the inputs in a `HeldOut`: -> {name: number}.

    valid_words            the share of filled words that are in the lexicon
    exact_words            the share of filled words that equal the hidden word
    distinct_words         the number of different valid words in the first fills of all inputs,
                           divided by the number of different hidden words
    ngram_bits             how surprising a character near a blank is to a 5-gram model
    different_valid_words  if n > 1: the mean number of different valid fills of a hidden word
    pass@n                 if n > 1: the share of inputs that have a fill with all blanks right
    """
    n = fills.shape[1]
    batch = inputs.batch
    mask = batch.mask.cpu().numpy()  # (N,T)
    texts = decode(fills, inputs.vocabulary)
    rows = np.array(texts).reshape(-1, n)  # (N,n)
    counts = np.zeros(4)
    hidden, first = set(), set()
    for original, blanks, row in zip(decode(batch.tokens, inputs.vocabulary), mask, rows):
        for start, end in hidden_spans(original, blanks):
            words = [text[start:end] for text in row]
            valid = [is_valid(text, start, end, inputs.lexicon) for text in row]
            different = {*compress(words, valid)}
            counts += 1, sum(valid), words.count(original[start:end]), len(different)
            hidden.add(original[start:end])
            if valid[0]:
                first.add(words[0])
    total, n_valid, n_exact, n_different = counts.tolist()
    total = max(total, 1)  # avoids 0 / 0 if no whole word is hidden
    right = fills == batch.tokens[:, None]  # (N,n,T) also True where there is no blank
    probability = ngram(inputs.text, len(inputs.vocabulary) - 1)
    figures = {
        "valid_words": n_valid / (total * n),
        "exact_words": n_exact / (total * n),
        "distinct_words": len(first) / max(len(hidden), 1),
        "ngram_bits": ngram_bits(probability, mask, texts),
    }
    if n > 1:
        figures[f"pass@{n}"] = right.all(dim=-1).any(dim=1).float().mean().item()
        figures["different_valid_words"] = n_different / total
    return figures


def entropy(q, mask):
    """Compute the mean entropy of the blanks, in nats: mask (N,T) -> a number."""
    log_p = log_softmax(q.marginal().logits[mask], q.sampling.temperature)  # (blanks,V)
    return -expectation(log_p.exp(), log_p).mean().item()


def completion_lines(fills, said, inputs):
    """Make one dict for each fill: fills (N,n,T), said {name: (N,n)} -> a list of dicts.

    `said` is what the judge and the rewards said of the fills: one number per fill under each name.
    A dict holds the input of a fill, its text, and these numbers.
    """
    masked = inputs.batch.masked[:, None].expand(fills.shape)  # (N,n,T)
    columns = {"input": decode(masked, inputs.vocabulary)}
    columns["completion"] = decode(fills, inputs.vocabulary)
    for name, values in said.items():
        columns[name] = [round(value, 6) for value in values.flatten().tolist()]
    return [dict(zip(columns, line)) for line in zip(*columns.values())]


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # compiling for these shapes takes longer than it saves
def table(policy, before, judge, rewards, held_out, config, after_row=lambda: None):
    """Compute all rows of the table: -> result, lines.

    `result` is the dict for evaluation.json. `lines` is the list of dicts for completions.jsonl.
    `policy` maps a batch to a distribution over its fills, and so does `before`, the base model. We
    call `after_row` after each row. It may end the program.
    """
    batch = held_out.batch
    mask = batch.mask
    result = {}
    bar = tqdm(total=len(ROWS), desc="table", leave=False, disable=not is_first() or None)

    def add(name, fills, forward_passes):
        scores, said = opinions(judge, rewards, fills, batch)  # (N,n,T), {name: (N,n)}
        result[name] = measure(fills, held_out) | {"forward_passes": forward_passes}
        result[name] |= {part: values.mean().item() for part, values in said.items()}
        bar.update()
        after_row()
        return scores, said

    add("original", batch.tokens[:, None], 0)
    base = before(batch)
    for name, q in (("before", base), ("after", policy(batch))):
        completions = q.sample(batch.uniforms).completions  # (N,16,T)
        scores, said = add(f"{name}_sample", completions, 1)
        result[f"{name}_sample"]["entropy"] = entropy(q, mask)
        add(f"{name}_argmax", q.at(1.0).best_guess()[:, None], 1)
        if name == "before":
            add("before_best_of_16", best_by_word(base.at(1.0), completions, scores), 1)
    lines = completion_lines(completions, said, held_out)  # the fills that `policy` drew
    passes = mask.sum(dim=1).float().mean().item()
    for name in ("random", "confident"):
        blank_by_blank = fill_blank_by_blank(before, batch, config.seed, name == "confident")
        add(f"reference_sequential_{name}", blank_by_blank, passes)
    cheat = most_frequent_words(batch, held_out.text, held_out.vocabulary)
    add("most_frequent", cheat, 0)
    result["before_at_temperatures"] = rows = []
    for temperature in TEMPERATURES:
        drawn = base.at(temperature).sample(batch.uniforms)
        rows.append({"temperature": temperature} | measure(drawn.completions, held_out))
    bar.close()
    names = ("before_sample", "after_sample", "reference_sequential_confident")
    low, reached, high = (result[name]["valid_words"] for name in names)
    result["gap_closed"] = (reached - low) / (high - low) if high > low else None
    return result, lines


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def peek(policy, before, held_out, step):
    """Return lines that show how the base model and the policy fill three held-out texts.

    The first line has each model's share of valid words, measured on PEEK texts. Of these texts we
    show three that have many long hidden words, because the blanks of a long word are the likeliest
    to clash.
    """
    few = replace(held_out, batch=held_out.batch[:PEEK])
    batch = few.batch
    length = sum_over_words(batch.mask[:, None].float(), batch.words)[:, 0]  # (B,T) word lengths
    shown = length.sum(dim=1).argsort(descending=True, stable=True)[:3].tolist()
    texts = {"text": decode(batch.tokens, few.vocabulary)}
    valid = []
    for name, model in {"before": before, "now": policy}.items():
        if name == "now" and step == 0:  # the policy is still the base model
            continue
        fills = model(batch).sample(batch.uniforms).completions  # (N,16,T)
        valid.append(f"{name} {measure(fills, few)['valid_words']:.3f}")
        texts[name] = decode(fills[:, 0], few.vocabulary)
    lines = [f"step {step}: valid words on held-out text {', '.join(valid)}"]
    for i in shown:
        blanks = batch.mask[i].tolist()
        lines += [f"  {name:7s}{highlight(each[i], blanks)}" for name, each in texts.items()]
    return "\n".join(lines)


def aligned(rows):
    """Pad the cells of each column to one width, and join each row into a line of text."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def format_table(result, rows=tuple(ROWS), columns=tuple(COLUMNS)):
    """Format the dict of evaluation.json as a table with these rows and columns: -> str.

    Each part of the run's reward except `judge` adds a column, named "reward_NAME" in the dict.
    """
    columns = [*columns, *(name for name in result["original"] if name.startswith("reward_"))]
    cells = [["filled by", *(COLUMNS.get(name, name.removeprefix("reward_")) for name in columns)]]
    for name in rows:
        row = result[name]
        for each in row if isinstance(row, list) else [row]:
            numbers = [f"{each[column]:.3f}" if column in each else "" for column in columns]
            cells.append([ROWS[name].format(**each), *numbers])
    lines = aligned(cells)
    gap = result["gap_closed"]
    if gap is not None:
        lines.append(
            f"gap closed: {gap:.2f}   (0: as before, 1: as many valid words as surest first)"
        )
    if result["after_sample"]["judge"] > result["original"]["judge"]:
        lines.append("the judge prefers these fills to the original text: it is being fooled")
    return "\n".join([*lines, "what the columns are: grpo/README.md#the-table"])
