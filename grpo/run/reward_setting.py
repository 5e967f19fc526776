"""Turn the setting `reward`, such as judge:1,my.py:f:0.5, into `Rewards`."""

import math
import re
from collections.abc import Callable
from functools import partial

from data.user_mistake import Mistake
from grpo.reward import Rewards, log_odds, rule_reward
from grpo.run.user_file import load_function, user_reward

PART = re.compile(
    r"(judge|valid_words|right|.+\.pt|.+\.py:[^\W\d]\w*)(?::(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))?"
)


def parse_reward(text: str) -> dict[str, float]:
    """Turn "judge:1,my.py:f:0.5" into {"judge": 1.0, "my.py:f": 0.5}, or raise a Mistake."""
    weights = {}
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        weight = float(match[2] or 1) if match else math.nan
        if not math.isfinite(weight) or match[1] in weights:
            raise Mistake(
                f"reward={text!r} has a part {part!r} that is not allowed; write NAME or"
                " NAME:WEIGHT, with each NAME only once, where NAME is judge, valid_words (text),"
                " right (sums), FILE.py:FUNCTION or JUDGE.pt"
            )
        weights[match[1]] = weight
    return weights


def make_rewards(text: str, judge: Callable | None, rule, load_judge: Callable) -> Rewards:
    """Make the `Rewards` that the setting `reward`, a text, describes.

    `judge` maps tokens to log-odds, `rule` says which fills are good (None if the dataset has no
    rule), and load_judge(file) loads one more judge.
    """
    parts = {}
    for name, weight in parse_reward(text).items():
        if name == "judge":
            if judge is None:
                raise Mistake(f"reward={text} needs a judge; name one as judge_checkpoint")
            part = partial(log_odds, judge)
        elif name in ("valid_words", "right"):
            if rule is None or name != rule.name:
                allowed = ["judge", "JUDGE.pt", "FILE.py:FUNCTION", *([rule.name] if rule else [])]
                raise Mistake(
                    f"reward={name}: this dataset has no such rule; use {', '.join(allowed)}"
                )
            part = partial(rule_reward, rule)
        elif name.endswith(".pt"):
            part = partial(log_odds, load_judge(name))
        else:
            path, _, name = name.rpartition(":")  # in the metrics, my.py:f is called f
            if name in {"judge", "valid_words", "right", *parts}:
                raise Mistake(f"reward={text}: the name {name} is taken; rename the function")
            part = partial(user_reward, name, load_function(path, name))
        parts[name] = (part, weight)
    return Rewards(parts)
