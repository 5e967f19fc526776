"""Is it really better? Figures that neither the loss nor (but for `judge`) the judge sees.

Letters: N held-out inputs, n fills of each, T characters, V vocabulary.
Reward alone proves nothing: it is what was optimised. And a low temperature alone raises most
figures. So the rows to beat are the *argmax* of the base model, the generator as the run began,
its draws at lower temperatures, and the judge's choice among 16 of them: what GRPO's reward can do
without any training. What each row and column is: grpo/README.md#the-table.
"""

import json
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data.masking import parse_masking
from data.words import decode, hidden_words, highlight, is_valid, lexicon
from grpo.evaluation.decoding import AT_ONCE, best_by_run, fill_blank_by_blank
from grpo.evaluation.ngram import ngram, ngram_bits
from grpo.logprobs import expectation, log_softmax
from grpo.mixture import likeliest, marginal
from grpo.plumbing.checkpoint import write
from grpo.plumbing.distributed import is_first
from grpo.policy import sample
from grpo.reward import log_odds, mean_over_blanks
from grpo.rollout import in_batches, to_fill

EVALUATION_SEED = 2**31  # no run's own seed: every run is evaluated on the same inputs
SAMPLES = 16  # fills of an input where fills are sampled
PEEK = 64  # inputs of a look in passing
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)  # at which the base model is drawn from

ROWS = {  # what fills the blanks: its title in the table
    "original": "original text",
    "before_sample": "before, one step, sampled",
    "before_argmax": "before, one step, argmax",
    "before_best_of_16": "before, best of 16",
    "after_sample": "after, one step, sampled",
    "after_argmax": "after, one step, argmax",
    "after_best_of_16": "after, best of 16",
    "reference_sequential_random": "blank by blank, drawn",
    "reference_sequential_confident": "blank by blank, surest",
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
# What a run prints when it ends, within 80 characters.
SHORT_ROWS = [
    "original",
    "before_sample",
    "before_argmax",
    "before_best_of_16",
    "after_sample",
    "after_argmax",
    "reference_sequential_random",
    "reference_sequential_confident",
]
SHORT_COLUMNS = [
    "judge",
    "valid_words",
    "exact_words",
    "distinct_words",
    "ngram_bits",
    "entropy",
    "forward_passes",
]


@dataclass
class HeldOut:
    """Held-out inputs, and what fills of them are measured by."""

    tokens: torch.Tensor  # (N,T)
    mask: torch.Tensor  # (N,T)
    masked: torch.Tensor  # (N,T)
    uniforms: torch.Tensor  # (N,16,T)
    z_uniforms: torch.Tensor  # (N,16,T)
    vocabulary: str
    text: str  # of the training split
    lexicon: set

    def first(self, n):
        """The first n of them."""
        tensors = {k: x[:n] for k, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **tensors)


def hold_out(config, train, val, device, seed=EVALUATION_SEED):
    """Inputs with the run's own masking: a function of the settings and the seed."""
    N, T = config.eval_inputs, config.block_size
    masking = parse_masking(config.masking)
    batch = val.batch(N, T, masking, config.mask_ratio, config.hidden_words, (seed, 0))
    inputs = to_fill(*batch, train.mask_id, SAMPLES, (seed,))
    tensors = (x.to(device) for x in inputs[:5])
    text = train.decode(train.tokens)
    return HeldOut(*tensors, train.vocabulary, text, lexicon(text))


def opinions(judge, rewards, fills, inputs):
    """The judge's log-odds of each run, and what is said of whole fills, the judge's as P(real).

    fills (N,n,T) -> (N,n,T), {"judge": (N,n), "reward_NAME" of each other part: (N,n)}
    """
    scores = log_odds(judge, fills, inputs.mask)  # (N,n,T)
    said = {"judge": mean_over_blanks(scores.sigmoid(), inputs.mask)}  # (N,n)
    for name in rewards.parts:
        if name != "judge":
            each = rewards.score(name, fills, inputs.masked, inputs.mask)  # (N,n,T)
            said[f"reward_{name}"] = mean_over_blanks(each, inputs.mask)
    return scores, said


def measure(fills, inputs):
    """All figures of fills (N,n,T) -> {name: number}. Words are the hidden ones.

    valid_words, exact_words: shares, over all fills.
    distinct_words: different valid words among the first fills ÷ different hidden words.
    With several fills, different_valid_words: in the n fills of a word.
    """
    n = fills.shape[1]
    mask = inputs.mask.cpu().numpy()  # (N,T)
    texts = decode(fills, inputs.vocabulary)
    rows = np.array(texts).reshape(-1, n)  # (N,n)
    counts = np.zeros(4)
    hidden, first = set(), set()
    for original, blanks, row in zip(decode(inputs.tokens, inputs.vocabulary), mask, rows):
        for start, end in hidden_words(original, blanks):
            words = [text[start:end] for text in row]
            valid = [is_valid(text, start, end, inputs.lexicon) for text in row]
            different = {*compress(words, valid)}
            counts += 1, sum(valid), words.count(original[start:end]), len(different)
            hidden.add(original[start:end])
            if valid[0]:
                first.add(words[0])
    total, n_valid, n_exact, n_different = counts.tolist()
    total = max(total, 1)  # without a hidden word all is 0
    right = fills == inputs.tokens[:, None]  # (N,n,T) as it is wherever there is no blank
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


def completion_lines(fills, said, inputs):
    """Every single fill (N,n,T) and what was said of it, {name: (N,n)}: a list of dicts."""
    masked = inputs.masked[:, None].expand(fills.shape)  # (N,n,T)
    columns = {"input": decode(masked, inputs.vocabulary)}
    columns["completion"] = decode(fills, inputs.vocabulary)
    for name, values in said.items():
        columns[name] = [round(value, 6) for value in values.flatten().tolist()]
    return [dict(zip(columns, line)) for line in zip(*columns.values())]


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # shapes of their own are not worth compiling for
def table(policy, before, judge, rewards, held_out, config):
    """All rows -> what evaluation.json and completions.jsonl hold.

    policy, before (the base model) and judge are functions of tokens.
    """
    mask, masked = held_out.mask, held_out.masked
    result = {}
    bar = tqdm(total=len(ROWS), desc="table", leave=False, disable=not is_first() or None)

    def add(name, fills, forward_passes):
        scores, said = opinions(judge, rewards, fills, held_out)  # (N,n,T), (N,n) each
        result[name] = measure(fills, held_out) | {"forward_passes": forward_passes}
        result[name] |= {part: values.mean().item() for part, values in said.items()}
        bar.update()
        return scores, said

    add("original", held_out.tokens[:, None], 0)
    base = in_batches(before, masked, AT_ONCE)  # (N,T,V) or (N,T,K,V)
    now = in_batches(policy, masked, AT_ONCE)  # as base
    for name, logits in (("before", base), ("after", now)):
        fills = sample(logits, held_out, config)
        of_blanks = marginal(logits, mask, config.temperature)[mask]  # (blanks,V)
        log_p = log_softmax(of_blanks, config.temperature)
        scores, said = add(f"{name}_sample", fills.completions, 1)
        result[f"{name}_sample"]["entropy"] = -expectation(log_p.exp(), log_p).mean().item()
        add(f"{name}_argmax", likeliest(logits, masked, mask)[:, None], 1)
        add(f"{name}_best_of_16", best_by_run(base, fills.completions, scores, mask), 1)
    completions = completion_lines(fills.completions, said, held_out)  # of after_sample
    passes = mask.sum(dim=1).float().mean().item()
    for name in ("random", "confident"):
        blank_by_blank = fill_blank_by_blank(before, masked, mask, config, name == "confident")
        add(f"reference_sequential_{name}", blank_by_blank, passes)
    result["before_at_temperatures"] = rows = []
    for temperature in TEMPERATURES:
        drawn = sample(base, held_out, replace(config, temperature=temperature))
        rows.append({"temperature": temperature} | measure(drawn.completions, held_out))
    bar.close()
    names = ("before_sample", "after_sample", "reference_sequential_confident")
    low, reached, high = (result[name]["valid_words"] for name in names)
    result["gap_closed"] = (reached - low) / (high - low) if high > low else None
    return result, completions


def save(out_dir, result, completions):
    """Write evaluation.json and completions.jsonl."""
    lines = "".join(json.dumps(line) + "\n" for line in completions)
    write(Path(out_dir) / "completions.jsonl", lines.encode())
    write(Path(out_dir) / "evaluation.json", json.dumps(result, indent=1).encode())


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def peek(policy, before, held_out, config, step):
    """A look in passing: valid words on the first inputs, and a few fills before and now."""
    few = held_out.first(PEEK)
    texts = {"text": decode(few.tokens, few.vocabulary)}
    valid = []
    for name, model in (("before", before), ("now", policy)):
        fills = sample(model(few.masked), few, config).completions  # (N,16,T)
        valid.append(f"{measure(fills, few)['valid_words']:.2f} {name}")
        texts[name] = decode(fills[:, 0], few.vocabulary)
    lines = [f"step {step}: valid words on held-out text {', '.join(valid)}"]
    for i, blanks in enumerate(few.mask[:5].tolist()):
        lines += [f"  {name:7s}{highlight(each[i], blanks)}" for name, each in texts.items()]
    return "\n".join(lines)


def aligned(rows):
    """Rows of texts -> lines, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def format_table(result, rows=tuple(ROWS), columns=tuple(COLUMNS)):
    """What evaluation.json holds, as text: these rows and columns, and the run's own rewards."""
    columns = [*columns, *(name for name in result["original"] if name.startswith("reward_"))]
    cells = [["filled by", *(COLUMNS.get(name, name) for name in columns)]]
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
