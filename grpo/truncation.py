"""Draw only some of the characters. By default a policy draws any.

Each truncation is a function of four arguments, and narrows the set S of characters that may be
drawn. weights (...,V) are whole numbers in proportion to the probabilities, and `kept` (...,V) bool
is what may still be drawn. uniforms (...,n) are the random numbers of a blank, for a coin toss. It
returns what is kept (...,V) bool. TRUNCATIONS says which setting turns it on, and with which value
it is off. `may_be_drawn` in grpo/policy.py calls those that are on, in this order. To add one of
your own, write such a function, a line in TRUNCATIONS, and its setting in Config.

Both sampling and scoring use S, so what is differentiated is what was drawn from.

Shapes: B masked inputs, T characters, V vocabulary.
"""

import torch

UNIT = 1 << 24  # a float32 uniform is a multiple of 1 / UNIT


def top_k(weights, kept, uniforms, config):
    """Keep the k likeliest characters, and any that ties with the last of them."""
    last = weights.topk(min(config.top_k, weights.shape[-1]), dim=-1).values[..., -1:]  # (...,1)
    return kept & (weights >= last)


def top_p(weights, kept, uniforms, config):
    """Keep the likeliest characters that hold the share top_p of the weight (1904.09751).

    We go down from the likeliest character until the sum reaches the share, and also keep any
    character that ties with the last one.
    """
    falling = (weights * kept).sort(dim=-1, descending=True).values  # (...,V)
    total = falling.sum(dim=-1, keepdim=True).double()  # (...,1)
    enough = (total * config.top_p).ceil()  # (...,1)
    still_short = falling.cumsum(dim=-1) < enough  # (...,V)
    last = still_short.sum(dim=-1, keepdim=True)  # (...,1) rank of the last character we keep
    return kept & (weights >= falling.gather(-1, last))


def min_p(weights, kept, uniforms, config):
    """Drop characters that are less than min_p times as likely as the likeliest (2407.01082)."""
    best = weights.amax(dim=-1, keepdim=True).double()  # (...,1)
    return kept & (weights >= best * config.min_p)


def exclude_top_choices(weights, kept, uniforms, config):
    """Leave out the likeliest characters now and then (XTC, text-generation-webui's pull 6335).

    A kept character is a top choice if it has at least the share xtc_threshold of the total weight
    of the kept characters. With probability xtc_probability, a blank loses all of its top choices
    but the least likely one. All G completions draw from the same characters, so we toss one coin
    for each blank. The coin is what follows the decimal point of the sum of all uniforms of the
    blank: it is uniform, too, and says nothing about any single one of them.
    """
    coin = (uniforms * UNIT).long().sum(dim=-1, keepdim=True) % UNIT  # (...,1)
    share = config.xtc_threshold * (weights * kept).sum(dim=-1, keepdim=True).double()  # (...,1)
    top = kept & (weights >= share)  # (...,V)
    most = weights.amax(dim=-1, keepdim=True)  # (...,1)
    least = torch.where(top, weights, most).amin(dim=-1, keepdim=True)  # (...,1)
    left_out = (coin < config.xtc_probability * UNIT) & top & (weights > least)  # (...,V)
    return kept & ~left_out


TRUNCATIONS = {  # {setting: (the value that turns it off, function)}
    "top_k": (0, top_k),
    "top_p": (1, top_p),
    "min_p": (0, min_p),
    "xtc_probability": (0, exclude_top_choices),
}


def penalise_repetition(logits, masked, mask, blank, penalty):
    """Make a character less likely if the visible text has it: logits (B,T,...,V) -> (B,T,...,V).

    CTRL (1909.05858, section 4.1) divides the logit by the penalty, but division would make a
    negative logit larger. We multiply negative logits instead, as others do. A constant added to
    all logits changes no probability, so it should not decide which logits are negative. We
    therefore centre them first. The penalty does little here, because any input shows most of the
    alphabet.
    """
    V = logits.shape[-1]
    visible = masked.masked_fill(mask | (masked < 0), blank)  # (B,T) padding becomes a blank, too
    seen = torch.zeros(len(masked), V, dtype=torch.bool, device=masked.device)
    seen = seen.scatter(1, visible, True)  # (B,V)
    seen = seen.view(-1, *(1,) * (logits.dim() - 2), V)  # (B,1,...,V)
    characters = torch.cat([logits[..., :blank], logits[..., blank + 1 :]], dim=-1)  # (B,T,...,V-1)
    centred = logits - characters.mean(dim=-1, keepdim=True)  # (B,T,...,V)
    penalised = torch.where(centred > 0, centred / penalty, centred * penalty)
    return torch.where(seen, penalised, centred)
