"""Compare the metrics of a step with loops. Shapes: B inputs, T characters, G completions."""

import math
import statistics

import pytest
import torch
from conftest import BLANK, encode, make_batch

from grpo.logprobs import Scores
from grpo.loss import Terms
from grpo.metrics import Rollout, StepMetrics, text_metrics
from grpo.sampling import Fills

B, G, T = 4, 3, 5
UPDATES = [[[0, 1], [2]], [[3, 0], [1, 2]]]  # the first takes three inputs, the second all four


def random_step():
    """Draw random tensors to compute metrics from. Scores of visible characters are 0."""
    g = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = torch.rand(B, T, generator=g) < 0.6  # (B,T)
    parts = {"reward": some(B, G), "reward_judge": some(B, G)}
    parts["reward"][1] = 0.3 + 1e-8 * some(G)  # equal but for rounding
    draws = mask[:, None]
    old, *now = (Scores(*2 * [draws * some(B, G, T)], *2 * [mask * some(B, T)]) for _ in range(3))
    terms = [[Terms(*some(3), torch.tensor(2 + i + 5 * k)) for i in (0, 1)] for k in (0, 1)]
    return mask, parts, old, now, terms


def slow_metrics(mask, parts, old, now, terms, norms):
    """Average over draws or blanks within each update, then over the updates."""
    rewards = parts["reward"].flatten().tolist()
    draws = [(b, j, t) for b, t in mask.nonzero().tolist() for j in range(G)]
    each = []
    for k, update in enumerate(UPDATES):
        rows = sum(update, [])
        drawn = [at for at in draws if at[0] in rows]
        moved = [(now[k].logp[at] - old.logp[at]).item() for at in drawn]
        figures = {
            "mean_kl": statistics.mean(now[k].kl[b, t].item() for b, _, t in drawn),
            "entropy": statistics.mean(now[k].entropy[b, t].item() for b, _, t in drawn),
            "mean_log_prob": statistics.mean(now[k].logp[at].item() for at in drawn),
            "approx_kl": statistics.mean(math.exp(d) - 1 - d for d in moved),
            "clip_ratio": sum(term.clipped.item() for term in terms[k]) / len(drawn),
        }
        for name in ("loss", "pg_loss", "kl_penalty"):
            figures[name] = sum(getattr(term, name).item() for term in terms[k])
        each.append(figures)
    return {name: statistics.mean(figures[name] for figures in each) for name in each[0]} | {
        "grad_norm": statistics.mean(norms),
        "mean_reward": statistics.mean(rewards),
        "std_reward": statistics.stdev(rewards),
        "frac_reward_zero_std": 1 / B,
        "reward_judge": parts["reward_judge"].mean().item(),
    }


def test_metrics_add_up_over_micro_batches_and_average_over_updates():
    mask, parts, old, now, terms = random_step()
    norms = [0.5, 2.0]
    metrics = StepMetrics(parts)
    for k, update in enumerate(UPDATES):
        blanks = mask[sum(update, [])].sum()
        for rows, term in zip(update, terms[k]):
            metrics.add(now[k][rows], old[rows], term, blanks)
        metrics.updated(torch.tensor(norms[k]))
    have = {name: value.item() for name, value in metrics.result().items()}
    want = slow_metrics(mask, parts, old, now, terms, norms)
    assert have == pytest.approx(want, rel=1e-5)


def test_the_logged_words_are_of_each_inputs_own_completions():
    mask = encode("so ___ on so", "so cat __ so") == BLANK
    fills = encode("so cat xx so", "so xxx xx so", "so xxx on so", "so xxx on so").view(2, 2, -1)
    batch = make_batch(encode(*["so cat on so"] * 2), mask, BLANK, 2, (0,))
    rollout = Rollout(batch, Fills(fills, None), None, None, None)
    assert text_metrics(rollout, {"cat", "on"}, cut=True)["valid_words"] == 3 / 4
