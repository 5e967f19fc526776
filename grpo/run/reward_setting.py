"""Turn the setting `reward`, such as judge:1,my.py:f:0.5, into `Rewards`."""

import math
import re
from functools import partial

from data.user_mistake import refuse
from grpo.reward import Rewards, judge_reward, rule_reward
from grpo.run.user_file import load_function, own_reward

PART = re.compile(
    r"(judge|valid_words|right|.+\.pt|.+\.py:[^\W\d]\w*)(?::(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))?"
)


def parse_reward(text):
    """Turn "judge:1,my.py:f:0.5" into {"judge": 1.0, "my.py:f": 0.5}, or raise a Mistake."""
    weights = {}
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        weight = float(match[2] or 1) if match else math.nan
        refuse(
            not math.isfinite(weight) or match[1] in weights,
            f"reward={text!r} has a part {part!r} that is not allowed; write NAME or NAME:WEIGHT,"
            " with each NAME only once, where NAME is judge, valid_words, right, FILE.py:FUNCTION"
            " or JUDGE.pt",
        )
        weights[match[1]] = weight
    return weights


def make_rewards(text, judge, rule, load_judge):
    """Make the `Rewards` that the setting `reward`, a text, describes.

    `judge` maps tokens to log-odds, `rule` says which fills are good, and load_judge(file) loads
    one more judge.
    """
    parts = {}
    for name, weight in parse_reward(text).items():
        path, _, function = name.rpartition(":")  # my.py:f has the short name f in the metrics
        if name == "judge":
            refuse(judge is None, f"reward={text} needs a judge; name one as judge_checkpoint")
            part = partial(judge_reward, judge)
        elif name in ("valid_words", "right"):
            refuse(name != rule.name, f"reward={name} does not fit this dataset; use {rule.name}")
            part = partial(rule_reward, rule)
        elif name.endswith(".pt"):
            part = partial(judge_reward, load_judge(name))
        else:
            name = function
            part = partial(own_reward, name, load_function(path, name))
        refuse(name in parts, f"reward={text}: the name {name} is taken; rename one")
        parts[name] = (part, weight)
    return Rewards(parts)
