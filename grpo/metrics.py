"""The figures of one step, as tensors: nothing here waits for the device.

Letters: B inputs, G completions of each, P parts of the reward; the rest as in grpo/rollout.py.
"""

import torch

from grpo.advantage import INDISTINCT
from grpo.plumbing.distributed import add_up, gather


class StepMetrics:
    """Of the rollout, at once; of the updates, sums over micro-batches and means over updates."""

    def __init__(self, rewards, parts, advantages, p_equal, beta, config):
        """parts (B,G,P), advantages (B,G,·) and p_equal (B,) of this process's inputs."""
        parts = gather(parts)
        total = rewards.total(parts)  # (B,G)
        span = total.amax(dim=1) - total.amin(dim=1)  # (B,)
        self.figures = {
            "mean_reward": total.mean(),
            "std_reward": total.std(),
            "mean_advantage": gather(advantages).mean(),
            "frac_reward_zero_std": (span <= INDISTINCT).float().mean(),
            "dead_groups_foretold": gather(p_equal).mean(),
        }
        for i, name in enumerate(rewards.names):
            self.figures[f"reward_{name}"] = parts[..., i].mean()
        if config.kl_target:
            self.figures["kl_weight"] = beta
        self.sums = {}
        self.norms = []

    def add(self, parts, now, batch, totals):
        """Of one micro-batch: what `grpo_loss` returned, the policy's `Stats`, `Totals`."""
        blanks = totals.blanks
        draws = now.logp.shape[1] * blanks
        d = now.logp.detach() - batch.old_logp
        drift = d.exp() - 1 - d  # k3 of KL(old‖now)
        figures = {
            "loss": parts["loss"],
            "pg_loss": parts["pg_loss"],
            "kl_penalty": parts["kl_penalty"],
            "mean_kl": now.kl.sum() / blanks,
            "entropy": now.entropy.sum() / blanks,
            "mean_log_prob": now.logp.sum() / draws,
        }
        figures["clip_ratio"] = parts["clipped"] / draws
        figures["approx_kl"] = drift.sum() / draws
        for name, value in figures.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().float()

    def updated(self, grad_norm):
        """After an optimizer step."""
        self.norms.append(grad_norm)

    def result(self):
        """{metric of the whole step: scalar tensor}."""
        sums = torch.stack(list(self.sums.values())) / len(self.norms)
        add_up([sums])
        of_updates = dict(zip(self.sums, sums))
        return of_updates | {"grad_norm": torch.stack(self.norms).mean()} | self.figures
