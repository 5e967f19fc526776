"""
The frozen judge scores completions. Letters: B masked inputs, T characters, G group size.
"""
import torch
import torch.nn.functional as F

ROWS = 64  # scored at once on a CPU: the activations of more rows leave its cache, and the same work takes longer


@torch.no_grad()
def judge_scores(judge, completions):
    """P(real) of every character: completions (B,G,T) -> (B,G,T) in [0,1]. `judge` maps (N,T) to logits (N,T)."""
    rows = completions.flatten(0, 1)                                                      # (B·G,T)
    parts = rows.split(ROWS) if rows.device.type == "cpu" else (rows,)
    return torch.cat([judge(part).float().sigmoid() for part in parts]).view(completions.shape)


def credit(scores, window):
    """What each blank is rewarded by: judge scores (B,G,T) -> (B,G,1), or (B,G,T) where blanks are credited one by one.

    window 0: the mean over the whole input, the reward of GRPO. window w > 0: the mean over the characters at most w places
    away. In one parallel step a blank's draw changes the judge's view mostly of its own word; what happens to
    another word is noise in its gradient. The price is a bias: effects further away than w are not credited.
    """
    if window == 0:
        return scores.mean(dim=-1, keepdim=True)
    return F.avg_pool1d(scores, 2 * window + 1, stride=1, padding=window, count_include_pad=False)
