"""One GRPO step: fill every input G times, score the completions, update the policy.

Letters: B masked inputs, T characters, G group size, V vocabulary. In one-shot filling the logits depend on the masked input alone, so its G completions
share them: a step is one forward pass of generator and reference over B rows, one of the judge over B·G rows (on a CPU the different ones), and one
backward pass over B rows. Inputs are never repeated G times. (Only with several micro-batches or inner updates is the generator's forward pass made again
for each backward pass, so that one graph is held at a time.) What is compared over the step is compared over all of it: a baseline or a count that saw one
micro-batch would be another loss.
"""

from dataclasses import dataclass

import numpy as np
import torch

from grpo import kernel, sampling, stats
from grpo.advantage import INDISTINCT, advantages
from grpo.loss import grpo_loss, kl_weight, loss_weights, most_uncertain
from grpo.plumbing.distributed import add_up, gather, share, world


@dataclass
class Rollout:
    """Inputs as they were drawn and scored; nothing of it changes while the policy does. Every tensor has a row for each input."""

    masked: torch.Tensor  # (B,T) the input, blanks as mask tokens
    mask: torch.Tensor  # (B,T) bool
    completions: torch.Tensor  # (B,G,T)
    kept: torch.Tensor  # (B,T,V) bool
    ref_logits: torch.Tensor  # (B,T,V)
    credits: torch.Tensor  # (B,G,1) or (B,G,T) the reward of each blank
    parts: torch.Tensor  # (B,G,R) the R rewards of each completion, as `rewards.names`
    p_equal: torch.Tensor  # (B,) the probability that all G fills are equal
    logits: (
        torch.Tensor | None
    )  # (B,T,V) with their graph, for the first update; None: computed again then
    old_logp: (
        torch.Tensor | None
    )  # (B,G,T) log-probability when drawn; None: there is one update, whose own it is
    kl: torch.Tensor | None  # (B,T) when drawn, as `old_logp`
    entropy: torch.Tensor | None  # (B,T) when drawn, as `old_logp`
    advantages: torch.Tensor | None = None  # as `credits`
    learning: torch.Tensor | None = (
        None  # (B,T) bool, the blanks that carry policy gradient; None: all
    )

    def rows(self, index):
        """Some of the inputs: a slice, or numbers in any order."""
        return Rollout(**{name: None if x is None else x[index] for name, x in vars(self).items()})

    def split(self, size):
        """Batches of `size` inputs, in their order."""
        return (
            [self]
            if size >= len(self.mask)
            else [self.rows(slice(i, i + size)) for i in range(0, len(self.mask), size)]
        )


def join(rollouts):
    """The inverse of `Rollout.split`."""
    if len(rollouts) == 1:
        return rollouts[0]
    columns = {name: [vars(r)[name] for r in rollouts] for name in vars(rollouts[0])}
    return Rollout(
        **{
            name: None if column[0] is None else torch.cat(column)
            for name, column in columns.items()
        }
    )


def operations(config):
    """-> `sample_completions`, `stats`: the fused pair, or their definitions."""
    return (
        (kernel.sample_completions, kernel.stats)
        if config.kernel == "cuda"
        else (sampling.sample_completions, stats.stats)
    )


def draw_uniforms(inputs, group_size, length, seed):
    """(inputs,G,T) float32 in [0,1), a function of `seed` (a tuple of whole numbers) alone, the same on every device."""
    return torch.from_numpy(
        np.random.default_rng(seed).random((inputs, group_size, length), dtype=np.float32)
    )


def probability_of_equal_fills(logits, kept, mask, temperature, G):
    """P(all G fills of an input are equal) = Π over blanks of Σ_v q(v)^G, before anything is scored: -> (B,).
    Equal fills have equal rewards: the mean over inputs bounds the expected share of groups that teach nothing from below. Such groups are not skipped, that
    would bias the gradient."""
    log_q = stats.restrict(stats.log_softmax(logits, temperature), kept)  # (B,T,V)
    return stats.where_blank((G * log_q).logsumexp(dim=-1), mask).sum(dim=-1).exp()


def rollout(generator, reference, rewards, masked, mask, uniforms, config, clock, keep_graph):
    """Fill the B inputs G times from one forward pass, and score the completions -> Rollout."""
    sample_completions, compute_stats = operations(config)
    with torch.set_grad_enabled(keep_graph):
        logits = generator(masked)  # (B,T,V)
    with torch.no_grad():
        completions, kept = sample_completions(
            logits.detach(), masked, mask, uniforms, **sampling.options(config)
        )
        p_equal = probability_of_equal_fills(
            logits, kept, mask, config.temperature, uniforms.shape[1]
        )  # (B,)
        clock.mark("fill")
        ref_logits = reference(masked)  # (B,T,V)
        clock.mark("reference")
        credits, parts = rewards(completions, masked, mask, config.credit)
        clock.mark("judge")
        old_logp = kl = entropy = None
        if (
            config.num_iterations > 1
            or config.minibatch_size
            or config.top_entropy_quantile < 1
            or config.kl_target
        ):
            old_logp, _, kl, entropy = compute_stats(
                logits, ref_logits, completions, kept, mask, config.temperature
            )
    return Rollout(
        masked,
        mask,
        completions,
        kept,
        ref_logits,
        credits,
        parts,
        p_equal,
        logits if keep_graph else None,
        old_logp,
        kl,
        entropy,
    )


def differentiate(generator, r, counts, kl_beta, config, scaler):
    """Add the gradient of one micro-batch's loss to the parameters -> figures of the update that add up over micro-batches."""
    logits, G = (
        generator(r.masked) if r.logits is None else r.logits,
        r.completions.shape[1],
    )  # (B,T,V)
    _, compute_stats = operations(config)
    logp, ref_logp, kl, entropy = compute_stats(
        logits, r.ref_logits, r.completions, r.kept, r.mask, config.temperature
    )
    old_logp = logp.detach() if r.old_logp is None else r.old_logp  # (B,G,T)
    weights = loss_weights(r.mask, config.loss_type, G, **counts)  # (B,T)
    loss, figures = grpo_loss(
        logp,
        old_logp,
        ref_logp,
        kl,
        entropy,
        r.advantages,
        r.mask,
        weights,
        kl_beta,
        config.kl_estimator,
        config.entropy_coef,
        config.importance_sampling_level,
        config.clip_eps,
        config.clip_eps_high,
        config.clip_delta,
        r.learning,
    )
    scaler.scale(loss).backward()
    per_blank = {
        "mean_kl": kl.sum(),
        "entropy": entropy.sum(),
        "mean_log_prob": logp.sum() / G,
        "clip_ratio": figures.pop("clip_ratio"),
        "approx_kl": figures.pop("approx_kl"),
    }
    return figures | {name: value.detach() / counts["blanks"] for name, value in per_blank.items()}


def update(optimizer, scaler, grad_clip, loss):
    """Add up the gradients of all processes, clip, step -> the norm before clipping; 0 where float16 overflowed.
    Where the norm or the loss is not finite the step is left out, without waiting for the device: the fused AdamW then touches neither weights nor moments."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    health = loss.clone()
    add_up([*(p.grad for p in parameters), health])
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(parameters, grad_clip or float("inf"))
    if optimizer.defaults.get("fused") and not scaler.is_enabled():
        optimizer.found_inf = (
            ~(norm + health).isfinite()
        ).float()  # what a GradScaler hands to it, for float16
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm.nan_to_num(0, 0, 0) if scaler.is_enabled() else norm


def compare(r, rewards, config):
    """What takes the whole step, all micro-batches and processes: sets `advantages` and `learning` -> figures."""
    mask, credits, parts = (
        gather(r.mask),
        gather(r.credits),
        gather(r.parts),
    )  # (N,T), (N,G,1) or (N,G,T), (N,G,R) of all N inputs
    advantage = advantages(
        credits,
        config.baseline,
        config.scale_rewards,
        mask[:, None] if config.credit == "run" else None,
    )  # as `credits`
    r.advantages = share(advantage)
    if config.top_entropy_quantile < 1:
        r.learning = share(most_uncertain(gather(r.entropy), mask, config.top_entropy_quantile))
    weight = (
        {
            "kl_weight": kl_weight(
                config.kl_beta, config.kl_target, gather(r.kl).sum() / mask.sum().clamp(min=1)
            )
        }
        if config.kl_target
        else {}
    )
    total = rewards.total(parts)  # (N,G)
    equal = total.amax(dim=1) - total.amin(dim=1) <= INDISTINCT  # (N,)
    return {
        "mean_reward": total.mean(),
        "std_reward": total.std(),
        "mean_advantage": advantage.mean(),
        "frac_reward_zero_std": equal.float().mean(),
        "dead_groups_foretold": gather(r.p_equal).mean(),
        **{f"reward_{name}": parts[..., i].mean() for i, name in enumerate(rewards.names)},
        **weight,
    }


def grpo_step(
    generator,
    reference,
    rewards,
    optimizer,
    tokens,
    mask,
    mask_id,
    uniforms,
    config,
    clock,
    scaler=None,
    seed=(0, 0),
):
    """One step on this process's micro-batches: tokens, mask (A·B,T), uniforms (A·B,G,T) -> (Rollout, {metric of the whole step: scalar tensor}).

    `generator`, `reference` are callables from tokens to logits, `rewards` is a `reward.Rewards`, `scaler` a GradScaler, for float16; `seed`, a tuple
    of whole numbers, shuffles mini-batches. Nothing waits for the device, unless a reward of your own must.
    """
    scaler, processes = scaler or torch.amp.GradScaler(enabled=False), world()[0]
    masked, A = (
        tokens.masked_fill(mask, mask_id),
        config.gradient_accumulation_steps // processes,
    )  # (A·B,T)
    r = join(
        [
            rollout(
                generator,
                reference,
                rewards,
                *micro,
                config,
                clock,
                keep_graph=A == 1 and not config.minibatch_size,
            )
            for micro in zip(masked.chunk(A), mask.chunk(A), uniforms.chunk(A))
        ]
    )
    figures = compare(r, rewards, config)
    kl_beta = figures.get("kl_weight", config.kl_beta)
    size = config.minibatch_size or len(mask)
    updates, norms, sums = config.num_iterations * len(mask) // size, [], {}
    for inner in range(config.num_iterations):
        shuffled = r
        if config.minibatch_size:
            shuffled = r.rows(
                torch.from_numpy(np.random.default_rng((*seed, inner)).permutation(len(mask))).to(
                    mask.device, non_blocking=True
                )
            )
        for mini in shuffled.split(size):
            micros = mini.split(len(mask) // A)
            counts = {
                "inputs": len(mini.mask) * processes,
                "blanks": gather(mini.mask).sum().clamp(min=1),
                "micro_batches": len(micros) * processes,
            }
            for micro in micros:
                for name, value in differentiate(
                    generator, micro, counts, kl_beta, config, scaler
                ).items():
                    sums[name] = sums.get(name, 0) + value / updates
            r.logits = None  # their graph serves one backward pass
            norms.append(update(optimizer, scaler, config.grad_clip, sums["loss"]))
    totals = torch.stack([value.float() for value in sums.values()])
    add_up([totals])
    clock.mark("update")
    return r, dict(zip(sums, totals)) | {"grad_norm": torch.stack(norms).mean()} | figures
