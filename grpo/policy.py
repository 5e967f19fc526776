"""What a policy does: draw, and say how likely that was.

Of logits (B,T,V) the policy is a product over the blanks (grpo/sampling.py, grpo/logprobs.py),
fused on CUDA; of a generator with a latent, (B,T,K,V), a mixture (grpo/mixture.py).
"""

from grpo.cuda import kernel
from grpo.logprobs import LogProbs, compute_logprobs
from grpo.mixture import logprobs_of_pairs, sample_pairs
from grpo.sampling import Fills, options, sample_completions


def sample(logits, inputs, config):
    """Fill every input G times, as the run's settings say: logits -> `Fills`."""
    if logits.dim() == 4:
        return sample_pairs(logits, inputs, config)
    fused = config.kernel == "cuda"  # decided when the run began
    draw_all = kernel.sample_completions if fused else sample_completions
    where = (inputs.masked, inputs.mask, inputs.uniforms)
    completions, kept = draw_all(logits, *where, **options(config))  # (B,G,T), (B,T,V)
    return Fills(completions, kept, inputs.mask)


def logprobs(logits, ref_logits, fills, config):
    """Log-probabilities of the draws, exact KL and entropy, differentiable in `logits`.

    logits and ref_logits of one shape, `Fills` -> `LogProbs`.
    """
    if logits.dim() == 4:
        return logprobs_of_pairs(logits, ref_logits, fills, config)
    compute = kernel.logprobs if config.kernel == "cuda" else compute_logprobs
    completions, kept, mask, _ = fills
    return LogProbs(*compute(logits, ref_logits, completions, kept, mask, config.temperature))
