"""Estimate KL(q‖q_ref) from the letters that were drawn, instead of computing it exactly.

The estimators are Schulman's ("Approximating KL divergence"). Each is a function of `now`, the
`Scores` of an update, and returns one estimate for each drawn letter (B,G,T). They compare q and
q_ref only on the characters that may be drawn, while `exact` compares them on the whole vocabulary.
To add one of your own, write such a function and a line in KL_ESTIMATORS.

Shapes: B masked inputs, T characters, G completions of each.
"""


def k1(now):
    """log q(y) − log q_ref(y). As a loss its expected gradient is 0, so it restrains nothing."""
    return now.logp - now.ref_logp


def k2(now):
    """Half of the square of k1. Its expected gradient is that of KL(q‖q_ref)."""
    d = now.ref_logp - now.logp  # (B,G,T)
    return d * d / 2


def k3(now):
    """r − 1 − log r with r = q_ref(y)/q(y): the papers' choice.

    Its expected gradient is that of KL(q_ref‖q), while q is still the policy that drew the letters.
    """
    d = now.ref_logp - now.logp  # (B,G,T)
    return d.exp() - 1 - d


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
