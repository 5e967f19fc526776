"""
Is it really better? Numbers that neither the judge nor the loss sees, on held-out text.

    python -m grpo.evaluate out            # evaluate the run in `out` again

Letters: N held-out inputs, n fills of each, T characters, V vocabulary. Fills are (N,n,T). Reward alone proves nothing: it is what was
optimised. And low temperature alone raises most figures, so the row to beat is the *argmax* of the untouched reference.
"""
import functools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from data.masking import parse_masking
from grpo.checkpoint import load_model, read_training, write
from grpo.config import Config, Parser, convert, exit_on_mistake
from grpo.log import highlight
from grpo.reward import Rewards, judge_scores
from grpo.sampling import integer_weights, options, sample_completions
from grpo.setup import forward, load_data, load_frozen, pick_device
from grpo.stats import expectation, log_softmax, where_blank
from grpo.step import draw_uniforms
from grpo.words import decode, hidden_words, is_valid, lexicon

SAMPLES = 16           # fills per input where fills are sampled
EVALUATION_SEED = 2**31  # no run's own seed: every run is evaluated on the same inputs


def word_figures(tokens, mask, fills, vocabulary, words):
    """Shares of hidden words, over all fills: valid, exact; and distinct valid words of the first fills ÷ distinct hidden words."""
    n, mask = fills.shape[1], mask.cpu().numpy()
    originals, texts = decode(tokens, vocabulary), decode(fills, vocabulary)
    valid = exact = total = 0
    distinct, hidden = set(), set()
    for i, original in enumerate(originals):
        for start, end in hidden_words(original, mask[i]):
            hidden.add(original[start:end])
            for j in range(n):
                fill = texts[i * n + j]
                total += 1
                exact += fill[start:end] == original[start:end]
                if is_valid(fill, start, end, words):
                    valid += 1
                    if j == 0:
                        distinct.add(fill[start:end])
    return {"valid_words": valid / max(total, 1), "exact_words": exact / max(total, 1), "distinct_words": len(distinct) / max(len(hidden), 1)}


class NGram:
    """Interpolated character 5-gram with Witten-Bell smoothing (Witten & Bell 1991): a referee that nobody optimises.

    P(c | h) = (count(hc) + distinct(h) · P(c | h without its first character)) / (count(h) + distinct(h)),
    from 1/V up to four characters of context; distinct(h) counts the different characters seen after h.
    """

    def __init__(self, tokens, vocab_size, order=5):
        self.vocab_size, self.levels, self.order = vocab_size, [], order
        for k in range(1, order + 1):
            grams, counts = np.unique(self.codes(tokens[None], k), return_counts=True)
            contexts, first = np.unique(grams // vocab_size, return_index=True)
            self.levels.append((grams, counts, contexts, np.add.reduceat(counts, first), np.diff(np.append(first, len(grams)))))

    def codes(self, rows, k):
        """The k characters that end at each position, as one number: (N,T) -> (N, T-k+1)."""
        T = rows.shape[1]
        return sum(rows[:, i: T - k + 1 + i].astype(np.int64) * self.vocab_size ** (k - 1 - i) for i in range(k))

    def bits(self, rows):
        """−log2 P of each character given the four before it: (N,T) -> (N, T-4)."""
        def find(keys, values, wanted):
            i = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
            return np.where(keys[i] == wanted, values[i], 0)

        p = np.float64(1 / self.vocab_size)
        for k, (grams, counts, contexts, context_counts, distinct) in enumerate(self.levels, 1):
            code = self.codes(rows, k)[:, self.order - k:]                                # (N,T-4)
            total, kinds = find(contexts, context_counts, code // self.vocab_size), find(contexts, distinct, code // self.vocab_size)
            p = np.where(total > 0, (find(grams, counts, code) + kinds * p) / np.maximum(total + kinds, 1), p)
        return -np.log2(p)


def ngram_bits(ngram, mask, fills):
    """Bits per character over every position whose 5-gram touches a blank."""
    n, mask = fills.shape[1], mask.cpu().numpy()
    bits = ngram.bits(fills.reshape(-1, fills.shape[-1]).cpu().numpy())                   # (N·n,T-4)
    touches = np.lib.stride_tricks.sliding_window_view(mask, ngram.order, axis=1).any(axis=-1)  # (N,T-4)
    return float(bits[np.repeat(touches, n, axis=0)].mean()) if touches.any() else None


def pass_at_k(solved, n, k):
    """P(at least one of k of the n fills is right), unbiased (2107.03374, equation 1): solved (N,) counts -> mean over inputs."""
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in solved]))


@torch.no_grad()
def fill_sequential(generator, masked, mask, order, config, seed):
    """Fill blank by blank, one forward pass each: `random` order draws from the policy, `confident` takes the likeliest character of the
    surest blank. (N,T) -> fills (N,1,T)."""
    filled, left = masked.clone(), mask.clone()                                           # (N,T)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(int(mask.sum(dim=1).max())):
        rows = left.any(dim=1).nonzero().squeeze(1)                                       # (M,) inputs that still have blanks
        logits = generator(filled[rows])                                                  # (M,T,V)
        if order == "random":
            uniforms = torch.rand(len(rows), mask.shape[1], 2, generator=rng).to(masked.device)
            choice = sample_completions(logits, filled[rows], left[rows], uniforms[:, None, :, 0], **options(config))[0].squeeze(1)  # (M,T)
            preference = uniforms[..., 1]                                                 # (M,T)
        else:
            weights = integer_weights(logits, config.temperature)                         # (M,T,V)
            choice, preference = weights.argmax(dim=-1), weights.amax(dim=-1) / weights.sum(dim=-1)
        at = preference.masked_fill(~left[rows], -1).argmax(dim=1, keepdim=True)          # (M,1)
        filled[rows] = filled[rows].scatter(1, at, choice.gather(1, at))
        left[rows] = left[rows].scatter(1, at, False)
    return filled[:, None]


class Evaluation:
    """A fixed set of held-out inputs at the run's own maskings and sampling settings, and what to measure on it."""

    def __init__(self, config, judge, train, val, device):
        self.config, self.judge, self.vocabulary = config, judge, train.vocabulary
        self.words = lexicon(train.decode(train.tokens))
        self.train_tokens = train.tokens
        tokens, mask = val.batch(config.eval_inputs, config.block_size, parse_masking(config.masking), config.mask_ratio, config.hidden_words, (EVALUATION_SEED, 0))
        self.tokens, self.mask = tokens.to(device), mask.to(device)                       # (N,T)
        self.masked = self.tokens.masked_fill(self.mask, train.mask_id)
        self.rewards = Rewards(judge, config.reward, self.vocabulary, self.words)
        self.rewards.ask_all(self.tokens[:2, None].repeat(1, 3, 1), self.masked[:2], self.mask[:2])  # a mistake in them is found before anything is written

    @functools.cached_property
    def ngram(self):
        return NGram(self.train_tokens, len(self.vocabulary) - 1)

    def measure(self, fills, forward_passes, completions=None):
        """All figures of a set of fills (N,n,T) -> {name: number}; to the list `completions` every single one is added, with its rewards."""
        right = (fills == self.tokens[:, None]) | ~self.mask[:, None]                     # (N,n,T)
        judge = judge_scores(self.judge, fills).mean(dim=-1)                              # (N,n)
        figures = {"judge": judge.mean().item(), **word_figures(self.tokens, self.mask, fills, self.vocabulary, self.words),
                   "exact_chars": 1 - (~right).sum().item() / (self.mask.sum().item() * fills.shape[1]),
                   "ngram_bits": ngram_bits(self.ngram, self.mask, fills), "forward_passes": forward_passes}
        if fills.shape[1] == SAMPLES:
            solved = right.all(dim=-1).sum(dim=1).tolist()
            figures |= {f"pass@{k}": pass_at_k(solved, SAMPLES, k) for k in (1, 2, 4, 8, 16)}
        if completions is not None:
            rewards = {"judge": judge, **self.rewards.ask_all(fills, self.masked, self.mask)}
            columns = {name: [round(x, 6) for x in values.flatten().tolist()] for name, values in rewards.items()}
            inputs = [text for text in decode(self.masked, self.vocabulary) for _ in range(fills.shape[1])]
            completions += [dict(zip(("input", "completion", *columns), row)) for row in zip(inputs, decode(fills, self.vocabulary), *columns.values())]
        return figures

    @torch.no_grad()
    def one_step(self, generator, name, ref_log_p=None, completions=None):
        """The rows NAME_sample and NAME_argmax: every blank from one forward pass; and its log p (N,T,V).

        In nats and exact: entropy per blank; of whole inputs the entropy, the KL from `ref_log_p`, and log p(original text), whose mean
        exponential, `original_prob`, is the pass@1 that endless untruncated sampling would find.
        """
        logits = torch.cat([generator(rows) for rows in self.masked.split(64)])           # (N,T,V)
        uniforms = draw_uniforms(len(self.masked), SAMPLES, self.masked.shape[1], (EVALUATION_SEED, 1)).to(logits.device)
        fills, _ = sample_completions(logits, self.masked, self.mask, uniforms, **options(self.config))
        log_p = log_softmax(logits, self.config.temperature)                              # (N,T,V)
        entropy, kl = (where_blank(expectation(log_p.exp(), x).squeeze(-1), self.mask) for x in (-log_p, log_p - (log_p if ref_log_p is None else ref_log_p)))
        original = where_blank(log_p.gather(-1, self.tokens[..., None]).squeeze(-1), self.mask).sum(dim=1)  # (N,)
        exact = {"entropy": entropy.sum() / self.mask.sum(), "sequence_entropy": entropy.sum(dim=1).mean(), "sequence_kl": kl.sum(dim=1).mean(),
                 "original_log_prob": original.mean(), "original_prob": original.exp().mean()}
        argmax = torch.where(self.mask, logits.argmax(dim=-1), self.masked)[:, None]      # (N,1,T)
        return log_p, {f"{name}_sample": self.measure(fills, 1, completions) | {key: x.item() for key, x in exact.items()}, f"{name}_argmax": self.measure(argmax, 1)}

    @torch.no_grad()
    def peek(self, generator, reference, iteration, shown=5, inputs=64):
        """A look in passing: valid words on the first inputs, and the first few fills before and after, as text."""
        config, masked, mask = self.config, self.masked[:inputs], self.mask[:inputs]
        uniforms = draw_uniforms(len(masked), SAMPLES, masked.shape[1], (EVALUATION_SEED, 1)).to(masked.device)
        fills = [sample_completions(model(masked), masked, mask, uniforms, **options(config))[0]
                 for model in (reference, generator)]                                     # (inputs,n,T) each
        valid = [word_figures(self.tokens[:inputs], mask, f, self.vocabulary, self.words)["valid_words"] for f in fills]
        lines = [f"step {iteration}: valid words on held-out text {valid[0]:.2f} before, {valid[1]:.2f} now"]
        for i in range(min(shown, len(masked))):
            for name, rows in (("text", self.tokens), ("before", fills[0][:, 0]), ("now", fills[1][:, 0])):
                lines.append(f"  {name:7s}" + highlight(decode(rows[i], self.vocabulary)[0], mask[i].tolist()))
        return "\n".join(lines)

    def table(self, generator, reference, seed, completions=None):
        """Every row, and `gap_closed` -> what evaluation.json holds."""
        blanks = self.mask.sum(dim=1).float().mean().item()
        ref_log_p, rows = self.one_step(reference, "before")
        rows |= {"original": self.measure(self.tokens[:, None], 0), **self.one_step(generator, "after", ref_log_p, completions)[1]}
        for order in ("random", "confident"):
            rows[f"reference_sequential_{order}"] = self.measure(fill_sequential(reference, self.masked, self.mask, order, self.config, seed), blanks)
        before, after, best = (rows[name]["valid_words"] for name in ("before_sample", "after_sample", "reference_sequential_confident"))
        return rows | {"gap_closed": (after - before) / (best - before) if best != before else None, "masking": self.config.masking,
                       "inputs": len(self.masked), "temperature": self.config.temperature, "seed": seed}

    def finish(self, generator, reference):
        """Write evaluation.json, and completions.jsonl with every completion that was sampled -> the table, as text."""
        completions, out = [], Path(self.config.out_dir)
        result = self.table(generator, reference, self.config.seed, completions)
        write(out / "completions.jsonl", "".join(json.dumps(line, allow_nan=False) + "\n" for line in completions).encode())
        write(out / "evaluation.json", json.dumps(result, indent=1, allow_nan=False).encode())
        return format_table(result)


ROWS = {"original": "original text", "before_sample": "before, one step, sampled", "before_argmax": "before, one step, argmax",
        "after_sample": "after, one step, sampled", "after_argmax": "after, one step, argmax",
        "reference_sequential_random": "before, blank by blank, random", "reference_sequential_confident": "before, blank by blank, surest"}
COLUMNS = {"judge": "judge", "valid_words": "valid", "exact_words": "exact", "exact_chars": "chars", "distinct_words": "distinct", "ngram_bits": "bits",
           "entropy": "entropy", "pass@16": "pass@16", "forward_passes": "passes"}


def format_table(result):
    """`Evaluation.table` as text, in Markdown."""
    lines = ["| filled by | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---|" * len(COLUMNS)]
    for name, title in ROWS.items():
        cells = (result[name].get(column) for column in COLUMNS)
        lines.append(f"| {title:30s} | " + " | ".join("     " if value is None else f"{value:5.3f}" if value < 1 else f"{value:5.2f}" for value in cells) + " |")
    return "\n".join([*lines, f"gap closed: {'undefined' if result['gap_closed'] is None else format(result['gap_closed'], '.2f')}   (0: as before, 1: one step fills as many valid words as one step per blank)"])


def main(argv=None):
    parser = Parser(description="Print the before/after table of a run, and write its evaluation.json.")
    parser.add_argument("out_dir", help="a folder with checkpoint.pt")
    with exit_on_mistake("evaluate"):
        out = Path(parser.parse_args(argv).out_dir)
        config = Config(**{name: convert(name, value, out / "checkpoint.pt") for name, value in read_training(out / "checkpoint.pt")["config"].items()})
        train, val = load_data(config.dataset, config.block_size)
        models = [load_model(out / "checkpoint.pt", "generator", train.vocabulary), *load_frozen(config, train.vocabulary)]
        device = pick_device("auto")
        generator, reference, judge = (forward(model.to(device), device, replace(config, compile="false")) for model in models)
        evaluation = Evaluation(replace(config, out_dir=out), judge, train, val, device)
        print(evaluation.finish(generator, reference))


if __name__ == "__main__":
    main()
