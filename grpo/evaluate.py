"""Is it really better? Numbers that neither the judge nor the loss sees, on held-out text.

    python -m grpo.evaluate out            # evaluate the run in `out` again

Letters: N held-out inputs, n fills of each, T characters, V vocabulary. Fills are (N,n,T). Reward alone proves nothing: it is what was
optimised. And low temperature alone raises most figures, so the row to beat is the *argmax* of the untouched reference.
"""

import functools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from data.masking import parse_masking
from grpo.plumbing.checkpoint import load_model, read_training, write
from grpo.plumbing.config import Config, Parser, convert, exit_on_mistake
from grpo.plumbing.log import highlight
from grpo.rollout import as_policy
from grpo.plumbing.setup import forward, load_data, load_frozen, pick_device
from grpo.reward import Rewards, judge_scores
from grpo.sampling import integer_weights, options, sample_completions
from grpo.stats import expectation, log_softmax, where_blank
from grpo.rollout import draw_uniforms
from grpo.words import decode, hidden_words, is_valid, lexicon

SAMPLES = 16  # fills per input where fills are sampled
EVALUATION_SEED = 2**31  # no run's own seed: every run is evaluated on the same inputs
ORDER = 5  # characters that the n-gram referee looks at


def word_figures(tokens, mask, fills, vocabulary, words):
    """Shares of hidden words, over all fills: valid, exact; and distinct valid words of the first fills ÷ distinct hidden words."""
    n, mask, texts = fills.shape[1], mask.cpu().numpy(), decode(fills, vocabulary)
    cases = [
        (original[start:end], fill[start:end], is_valid(fill, start, end, words))
        for i, original in enumerate(decode(tokens, vocabulary))
        for start, end in hidden_words(original, mask[i])
        for fill in texts[i * n : (i + 1) * n]
    ]
    total, hidden, distinct = (
        max(len(cases), 1),
        {original for original, *_ in cases},
        {fill for _, fill, valid in cases[::n] if valid},
    )
    return {
        "valid_words": sum(valid for *_, valid in cases) / total,
        "exact_words": sum(original == fill for original, fill, _ in cases) / total,
        "distinct_words": len(distinct) / max(len(hidden), 1),
    }


@functools.cache
def ngram(text, vocab_size):
    """The probability of a character after the four before it, smoothed as Witten & Bell 1991: a referee that nobody optimises.

    P(c | h) = (count(hc) + distinct(h) · P(c | h without its first character)) / (count(h) + distinct(h)), from 1/V up,
    where distinct(h) counts the different characters seen after h. -> the function from the string hc to P(c | h)
    """
    count = Counter(text[i : i + k] for k in range(1, ORDER + 1) for i in range(len(text) - k + 1))
    followed, distinct = Counter(), Counter(gram[:-1] for gram in count)
    for gram, times in count.items():
        followed[gram[:-1]] += times

    @functools.cache
    def probability(gram):
        if not gram:
            return 1 / vocab_size
        h, shorter = gram[:-1], probability(gram[1:])
        return (
            (count[gram] + distinct[h] * shorter) / (followed[h] + distinct[h])
            if h in followed
            else shorter
        )

    return probability


def ngram_bits(probability, mask, texts):
    """Bits per character, −log2 P, over every position whose 5-gram touches a blank: mask (N,T), texts of N·n fills."""
    touches = np.lib.stride_tricks.sliding_window_view(mask.cpu().numpy(), ORDER, axis=1).any(
        axis=-1
    )  # (N,T-4)
    at = np.argwhere(
        np.repeat(touches, len(texts) // len(mask), axis=0)
    )  # rows of fill, first character
    return float(-np.log2([probability(texts[i][t : t + ORDER]) for i, t in at]).mean())


def pass_at_k(solved, n, k):
    """P(at least one of k of the n fills is right), unbiased (2107.03374, equation 1): solved (N,) counts -> mean over inputs."""
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in solved]))


@torch.no_grad()
def fill_sequential(generator, masked, mask, order, config, seed):
    """Fill blank by blank, one forward pass each: (N,T) -> (N,1,T). `random` order draws, `confident` takes the likeliest character of the surest blank."""
    filled, left, rng = (
        masked.clone(),
        mask.clone(),
        torch.Generator().manual_seed(seed),
    )  # (N,T), (N,T)
    while left.any():
        rows = left.any(dim=1).nonzero().squeeze(1)  # (M,) inputs that still have blanks
        logits = generator(filled[rows])  # (M,T,V)
        if order == "random":
            uniforms, preference = (
                torch.rand(len(rows), mask.shape[1], 2, generator=rng)
                .to(masked.device)
                .unbind(dim=-1)
            )  # (M,T) each
            choice = sample_completions(
                logits, filled[rows], left[rows], uniforms[:, None], **options(config)
            )[0][:, 0]  # (M,T)
        else:
            weights = integer_weights(logits, config.temperature)  # (M,T,V)
            choice, preference = weights.argmax(dim=-1), weights.amax(dim=-1) / weights.sum(dim=-1)
        at = preference.masked_fill(~left[rows], -1).argmax(dim=1)  # (M,)
        filled[rows, at], left[rows, at] = choice.gather(1, at[:, None]).squeeze(1), False
    return filled[:, None]


class Evaluation:
    """A fixed set of held-out inputs at the run's own maskings and sampling settings, and what to measure on it."""

    def __init__(self, config, judge, train, val, device):
        self.config, self.judge, self.vocabulary, self.text = (
            config,
            judge,
            train.vocabulary,
            train.decode(train.tokens),
        )
        self.words = lexicon(self.text)
        tokens, mask = val.batch(
            config.eval_inputs,
            config.block_size,
            parse_masking(config.masking),
            config.mask_ratio,
            config.hidden_words,
            (EVALUATION_SEED, 0),
        )
        self.tokens, self.mask = tokens.to(device), mask.to(device)  # (N,T)
        self.masked = self.tokens.masked_fill(self.mask, train.mask_id)
        self.uniforms = draw_uniforms(
            config.eval_inputs, SAMPLES, config.block_size, (EVALUATION_SEED, 1)
        ).to(device)  # (N,n,T)
        self.rewards = Rewards(judge, config, self.vocabulary, self.words, device)
        self.rewards(self.tokens[:2, None].repeat(1, 3, 1), self.masked[:2], self.mask[:2], config.credit)  # a mistake in them is found before anything is written

    def sample(self, logits):
        """SAMPLES fills of the first inputs, as many as there are logits (N,T,V), always from the same uniforms -> (N,n,T)."""
        N = len(logits)
        return sample_completions(
            logits, self.masked[:N], self.mask[:N], self.uniforms[:N], **options(self.config)
        )[0]

    def measure(self, fills, forward_passes, completions=None):
        """All figures of a set of fills (N,n,T) -> {name: number}; to the list `completions` every single one is added, with its rewards."""
        n, texts = fills.shape[1], decode(fills, self.vocabulary)
        right = (fills == self.tokens[:, None]) | ~self.mask[:, None]  # (N,n,T)
        judge = judge_scores(self.judge, fills).mean(dim=-1)  # (N,n)
        figures = {
            "judge": judge.mean().item(),
            **word_figures(self.tokens, self.mask, fills, self.vocabulary, self.words),
            "exact_chars": 1 - (~right).sum().item() / (self.mask.sum().item() * n),
            "ngram_bits": ngram_bits(ngram(self.text, len(self.vocabulary) - 1), self.mask, texts),
            "forward_passes": forward_passes,
        }
        if n == SAMPLES:
            solved = right.all(dim=-1).sum(dim=1).tolist()
            figures |= {f"pass@{k}": pass_at_k(solved, n, k) for k in (1, 2, 4, 8, 16)}
        if completions is not None:
            rewards = {
                "judge": judge,
                **{name: self.rewards.score(name, fills, self.masked, self.mask) for name in self.rewards.names if name != "judge"},
            }  # (N,n) each
            inputs = np.repeat(decode(self.masked, self.vocabulary), n).tolist()
            columns = [
                inputs,
                texts,
                *([round(x, 6) for x in values.flatten().tolist()] for values in rewards.values()),
            ]
            completions += [
                dict(zip(("input", "completion", *rewards), row)) for row in zip(*columns)
            ]
        return figures

    @torch.no_grad()
    def one_step(self, generator, name, ref_log_p=None, completions=None):
        """The rows NAME_sample and NAME_argmax: every blank from one forward pass; and its log p (N,T,V).

        In nats and exact: entropy per blank; of whole inputs the entropy, the KL from `ref_log_p`, and log p(original text), whose mean
        exponential, `original_prob`, is the pass@1 that endless untruncated sampling would find.
        """
        logits = torch.cat([generator(rows) for rows in self.masked.split(64)])  # (N,T,V)
        log_p = log_softmax(logits, self.config.temperature)  # (N,T,V)
        entropy, kl = (
            where_blank(expectation(log_p.exp(), x).squeeze(-1), self.mask)
            for x in (-log_p, log_p - (log_p if ref_log_p is None else ref_log_p))
        )
        original = where_blank(log_p.gather(-1, self.tokens[..., None]).squeeze(-1), self.mask).sum(
            dim=1
        )  # (N,)
        exact = {
            "entropy": entropy.sum() / self.mask.sum(),
            "sequence_entropy": entropy.sum(dim=1).mean(),
            "sequence_kl": kl.sum(dim=1).mean(),
            "original_log_prob": original.mean(),
            "original_prob": original.exp().mean(),
        }
        argmax = torch.where(self.mask, logits.argmax(dim=-1), self.masked)[:, None]  # (N,1,T)
        sampled = self.measure(self.sample(logits), 1, completions) | {
            key: x.item() for key, x in exact.items()
        }
        return log_p, {f"{name}_sample": sampled, f"{name}_argmax": self.measure(argmax, 1)}

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # shapes of their own are not worth compiling for
    def peek(self, generator, reference, iteration):
        """A look in passing: valid words on the first 64 inputs, and the first few fills before and after, as text."""
        tokens, mask = self.tokens[:64], self.mask[:64]
        before, now = (
            self.sample(model(self.masked[:64])) for model in (reference, generator)
        )  # (64,n,T) each
        valid = [
            word_figures(tokens, mask, fills, self.vocabulary, self.words)["valid_words"]
            for fills in (before, now)
        ]
        lines = [
            f"step {iteration}: valid words on held-out text {valid[0]:.2f} before, {valid[1]:.2f} now"
        ]
        for blanks, *texts in zip(
            mask[:5].tolist(),
            *(decode(rows, self.vocabulary) for rows in (tokens[:5], before[:5, 0], now[:5, 0])),
        ):
            lines += [
                f"  {name:7s}" + highlight(text, blanks)
                for name, text in zip(("text", "before", "now"), texts)
            ]
        return "\n".join(lines)

    @torch.compiler.set_stance("force_eager")
    def finish(self, generator, reference):
        """Write evaluation.json, a row of figures for every way to fill, and completions.jsonl, every completion of `after_sample` -> the table, as text."""
        config, completions, out = self.config, [], Path(self.config.out_dir)
        ref_log_p, rows = self.one_step(reference, "before")
        rows |= {
            "original": self.measure(self.tokens[:, None], 0),
            **self.one_step(generator, "after", ref_log_p, completions)[1],
        }
        for order in ("random", "confident"):
            fills = fill_sequential(reference, self.masked, self.mask, order, config, config.seed)
            rows[f"reference_sequential_{order}"] = self.measure(
                fills, self.mask.sum(dim=1).float().mean().item()
            )
        before, after, best = (
            rows[name]["valid_words"]
            for name in ("before_sample", "after_sample", "reference_sequential_confident")
        )
        rows |= {
            "gap_closed": (after - before) / (best - before) if best != before else None,
            "masking": config.masking,
            "inputs": len(self.masked),
            "temperature": config.temperature,
            "seed": config.seed,
        }
        write(
            out / "completions.jsonl",
            "".join(json.dumps(line, allow_nan=False) + "\n" for line in completions).encode(),
        )
        write(out / "evaluation.json", json.dumps(rows, indent=1, allow_nan=False).encode())
        return format_table(rows)


ROWS = {
    "original": "original text",
    "before_sample": "before, one step, sampled",
    "before_argmax": "before, one step, argmax",
    "after_sample": "after, one step, sampled",
    "after_argmax": "after, one step, argmax",
    "reference_sequential_random": "before, blank by blank, random",
    "reference_sequential_confident": "before, blank by blank, surest",
}
COLUMNS = {
    "judge": "judge",
    "valid_words": "valid",
    "exact_words": "exact",
    "exact_chars": "chars",
    "distinct_words": "distinct",
    "ngram_bits": "bits",
    "entropy": "entropy",
    "pass@16": "pass@16",
    "forward_passes": "passes",
}


def format_table(result):
    """What evaluation.json holds, as text, in Markdown."""
    lines = [
        "| filled by | " + " | ".join(COLUMNS.values()) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for name, title in ROWS.items():
        cells = (result[name].get(column) for column in COLUMNS)
        lines.append(
            f"| {title:30s} | "
            + " | ".join(
                "     " if value is None else f"{value:5.3f}" if value < 1 else f"{value:5.2f}"
                for value in cells
            )
            + " |"
        )
    gap = "undefined" if result["gap_closed"] is None else f"{result['gap_closed']:.2f}"
    return "\n".join(
        [
            *lines,
            f"gap closed: {gap}   (0: as before, 1: one step fills as many valid words as one step per blank)",
        ]
    )


def main(argv=None):
    parser = Parser(
        description="Print the before/after table of a run, and write its evaluation.json."
    )
    parser.add_argument("out_dir", help="a folder with checkpoint.pt")
    with exit_on_mistake("evaluate"):
        out = parser.parse_args(argv).out_dir
        saved = read_training(Path(out) / "checkpoint.pt")["config"]
        config = replace(
            Config(
                **{
                    name: convert(name, value, f"{out}/checkpoint.pt")
                    for name, value in saved.items()
                }
            ),
            out_dir=out,
            compile="false",
        )
        device, (train, val) = pick_device("auto"), load_data(config.dataset, config.block_size)
        models = (
            load_model(Path(out) / "checkpoint.pt", "generator", train.vocabulary),
            *load_frozen(config, train.vocabulary),
        )
        generator, reference, judge = (
            make(model.to(device), device, config) for make, model in zip((as_policy, as_policy, forward), models)
        )
        print(Evaluation(config, judge, train, val, device).finish(generator, reference))


if __name__ == "__main__":
    main()
