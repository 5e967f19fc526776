"""The figures of a run with a latent beside the base model's at other temperatures, as a table.

    PYTHONPATH=. python .github/frontier.py out-mixture

*choose* is the temperature of the prior, *spell* that of the letters; 0: the likeliest.
"""

import sys
from pathlib import Path

import torch
from grpo.mixture import at_blanks, spread
from grpo.plumbing.setup import forward, load_data, load_models
from grpo.policy import sample
from grpo.rollout import in_batches

from grpo.evaluation.evaluate import hold_out, measure
from grpo.plumbing.checkpoint import LATEST, read, training_state
from grpo.plumbing.config import from_saved

CPU = torch.device("cpu")
COLUMNS = ("valid_words", "exact_words", "distinct_words", "different_valid_words", "ngram_bits")


def at_temperatures(logits, mask, choose, spell):
    """The mixture whose prior and letters have temperatures of their own: (N,T,K,V) -> the same."""
    log_q, log_pi, run = at_blanks(logits, mask, 1.0)
    log_q = (log_q / max(spell, 1e-3)).log_softmax(dim=-1)  # (M,K,V)
    log_pi = (log_pi / choose).log_softmax(dim=-1)[run]  # (M,K)
    return spread(log_q + log_pi[..., None], mask)


@torch.no_grad()
def main(out):
    path = Path(out) / LATEST
    saved = read(path)
    config = from_saved(training_state(saved, path)["config"], path)
    train, val = load_data(config.dataset, config.block_size)
    generator, before, _ = load_models(config, train.vocabulary, saved)
    held_out = hold_out(config, train, val, CPU)
    rows = {}
    logits = in_batches(forward(generator, CPU, config), held_out.masked, 32)  # (N,T,K,V)
    rows["after"] = sample(logits, held_out, config)
    logits = in_batches(forward(before, CPU, config), held_out.masked, 32)
    for choose in (1.0, 0.5, 0.25):
        for spell in (1.0, 0.5, 0.0):
            tempered = at_temperatures(logits, held_out.mask, choose, spell)
            rows[f"choose {choose}, spell {spell}"] = sample(tempered, held_out, config)
    for name, fills in rows.items():
        figures = measure(fills.completions, held_out)
        numbers = [f"{figures[column]:.3f}" for column in (*COLUMNS, "pass@16")]
        print(f"{name:24s}", *numbers)


if __name__ == "__main__":
    main(sys.argv[1])
