"""The figures of one step.

Letters: B inputs, T characters, G completions of each, P parts of the reward; the rest as in
grpo/rollout.py. `StepMetrics` holds tensors, and waits for no device. `text_metrics` reads what was
written, when a line is logged: a place for your own.
"""

import torch

from data.words import hidden_words, is_valid
from grpo.advantage import INDISTINCT
from grpo.plumbing.distributed import add_up, gather


class StepMetrics:
    """Of the rollout, at once; of the updates, sums over micro-batches and means over updates."""

    def __init__(self, rewards, parts):
        """parts (B,G,P) of this process's inputs."""
        parts = gather(parts)
        total = rewards.total(parts)  # (B,G)
        span = total.amax(dim=1) - total.amin(dim=1)  # (B,)
        self.figures = {
            "mean_reward": total.mean(),
            "std_reward": total.std(),
            "frac_reward_zero_std": (span <= INDISTINCT).float().mean(),
        }
        for i, name in enumerate(rewards.parts):
            self.figures[f"reward_{name}"] = parts[..., i].mean()
        self.sums = {}
        self.norms = []

    @torch.no_grad()
    def add(self, terms, now, micro, batch):
        """Of one micro-batch: what `grpo_loss` returned, and the policy's `LogProbs`."""
        blanks = batch.blanks
        draws = now.logp.shape[1] * blanks
        d = now.logp - micro.old.logp
        drift = d.exp() - 1 - d  # k3 of KL(old‖now)
        figures = {
            "mean_kl": now.kl.sum() / blanks,
            "entropy": now.entropy.sum() / blanks,
            "mean_log_prob": now.logp.sum() / draws,
            "approx_kl": drift.sum() / draws,
            "clip_ratio": terms.pop("clipped") / draws,
        }
        figures |= terms  # loss, pg_loss, kl_penalty
        for name, value in figures.items():
            self.sums[name] = self.sums.get(name, 0) + value.float()

    def updated(self, grad_norm):
        """After an optimizer step."""
        self.norms.append(grad_norm)

    def result(self):
        """{metric of the whole step: scalar}."""
        sums = torch.stack(list(self.sums.values())) / len(self.norms)
        add_up([sums])
        of_updates = dict(zip(self.sums, sums))
        return of_updates | {"grad_norm": torch.stack(self.norms).mean()} | self.figures


def text_metrics(rollout, decode, lexicon, cut):
    """{metric: number} of the whole step: see data/words.py for lexicon and cut.

    valid_words: of the hidden words, those whose fill is a word of the lexicon. Unlike the reward
    of that name it knows the text: a fill that makes two words of one is wrong.
    """
    tokens = gather(rollout.inputs.tokens)  # (B,T)
    mask = gather(rollout.fills.mask).cpu().numpy()  # (B,T)
    completions = gather(rollout.fills.completions)  # (B,G,T)
    G = completions.shape[1]
    texts = decode(completions)
    valid = []
    for i, original in enumerate(decode(tokens)):
        for span in hidden_words(original, mask[i], cut):
            valid += [is_valid(text, *span, lexicon) for text in texts[i * G : (i + 1) * G]]
    return {"valid_words": sum(valid) / max(len(valid), 1)}
