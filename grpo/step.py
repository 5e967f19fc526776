"""
One GRPO step: fill every input G times, score the completions, update the policy.

Letters: B masked inputs, T characters, G group size, V vocabulary. In one-shot filling the logits depend on the masked input
alone, so its G completions share them: a step is one forward pass of generator and reference over B rows, one of the judge
over B·G rows, and one backward pass over B rows. Inputs are never repeated G times. (Only with several micro-batches or inner updates is
the generator's forward pass made again for each backward pass, so that one graph is held at a time.)
"""
from dataclasses import dataclass

import numpy as np
import torch

from grpo import kernel, sampling, stats
from grpo.advantage import INDISTINCT, advantages
from grpo.loss import grpo_loss, loss_weights
from grpo.reward import credit, judge_scores


@dataclass
class Rollout:
    """One micro-batch as it was drawn; it does not change while the policy does."""
    masked: torch.Tensor            # (B,T) the input, blanks as mask tokens
    mask: torch.Tensor              # (B,T) bool
    completions: torch.Tensor       # (B,G,T)
    kept: torch.Tensor              # (B,T,V) bool
    ref_logits: torch.Tensor        # (B,T,V)
    scores: torch.Tensor            # (B,G,T) the judge's P(real)
    logits: torch.Tensor | None     # (B,T,V) with their graph, for the first update; None: computed again then
    old_logp: torch.Tensor | None = None  # (B,G,T) log-probability when drawn, known from the first update on


def operations(config):
    """-> `sample_completions`, `stats`: the fused pair, or their definitions."""
    return (kernel.sample_completions, kernel.stats) if config.kernel == "cuda" else (sampling.sample_completions, stats.stats)


def draw_uniforms(inputs, group_size, length, seed):
    """(inputs,G,T) float32 in [0,1), a function of `seed` (a tuple of whole numbers) alone, the same on every device."""
    return torch.from_numpy(np.random.default_rng(seed).random((inputs, group_size, length), dtype=np.float32))


def rollout(generator, reference, judge, masked, mask, uniforms, config, clock, keep_graph):
    """Fill the B inputs G times from one forward pass, and score the completions -> Rollout."""
    with torch.set_grad_enabled(keep_graph):
        logits = generator(masked)                                                        # (B,T,V)
    sample_completions, _ = operations(config)
    completions, kept = sample_completions(logits.detach(), masked, mask, uniforms, config.temperature, config.top_k, config.top_p, config.min_p)
    clock.mark("fill")
    with torch.no_grad():
        ref_logits = reference(masked)                                                    # (B,T,V)
    clock.mark("reference")
    scores = judge_scores(judge, completions)                                             # (B,G,T)
    clock.mark("judge")
    return Rollout(masked, mask, completions, kept, ref_logits, scores, logits if keep_graph else None)


def differentiate(generator, r, advantage, counts, config):
    """Add the gradient of one micro-batch's loss to the parameters -> figures of the step that add up over micro-batches."""
    logits = generator(r.masked) if r.logits is None else r.logits                        # (B,T,V)
    r.logits = None  # its graph serves one backward pass
    _, compute_stats = operations(config)
    logp, ref_logp, kl, entropy = compute_stats(logits, r.ref_logits, r.completions, r.kept, r.mask, config.temperature)
    if r.old_logp is None:
        r.old_logp = logp.detach()                                                        # (B,G,T)
    weights = loss_weights(r.mask, config.loss_type, config.group_size, **counts)         # (B,T)
    loss, figures = grpo_loss(logp, r.old_logp, ref_logp, kl, entropy, advantage, r.mask, weights, config.kl_beta, config.kl_estimator,
                              config.entropy_coef, config.importance_sampling_level, config.clip_eps, config.clip_eps_high)
    loss.backward()
    per_blank = {"mean_kl": kl.sum(), "entropy": entropy.sum(), "mean_log_prob": logp.sum() / config.group_size,
                 "clip_ratio": figures.pop("clip_ratio"), "approx_kl": figures.pop("approx_kl")}
    return figures | {name: value.detach() / counts["blanks"] for name, value in per_blank.items()}


def grpo_step(generator, reference, judge, optimizer, tokens, mask, mask_id, uniforms, config, clock):
    """One step on all micro-batches: tokens, mask (A·B,T), uniforms (A·B,G,T) -> (rollouts, {metric: scalar tensor}).

    `generator`, `reference`, `judge` are callables from tokens to logits; nothing waits for the device.
    """
    masked, A = tokens.masked_fill(mask, mask_id), config.gradient_accumulation_steps     # (A·B,T)
    rollouts = [rollout(generator, reference, judge, *micro, config, clock, keep_graph=A == 1)
                for micro in zip(masked.chunk(A), mask.chunk(A), uniforms.chunk(A))]
    rewards = torch.cat([r.scores for r in rollouts]).mean(dim=-1)                        # (A·B,G)
    credits = torch.cat([credit(r.scores, config.credit_window) for r in rollouts])       # (A·B,G,1) or (A·B,G,T)
    advantage = advantages(credits, config.baseline, config.scale_rewards, mask[:, None] if config.credit_window else None)  # the same
    counts = {"inputs": len(mask), "blanks": mask.sum(), "micro_batches": A}
    sums = {}
    for _ in range(config.num_iterations):
        for r, a in zip(rollouts, advantage.chunk(A)):
            for name, value in differentiate(generator, r, a, counts, config).items():
                sums[name] = sums.get(name, 0) + value / config.num_iterations
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sums["grad_norm"] = sums.get("grad_norm", 0) + norm / config.num_iterations
    clock.mark("update")
    equal = rewards.amax(dim=1) - rewards.amin(dim=1) <= INDISTINCT
    return rollouts, sums | {"mean_reward": rewards.mean(), "std_reward": rewards.std(), "mean_advantage": advantage.mean(),
                             "frac_reward_zero_std": equal.float().mean()}
