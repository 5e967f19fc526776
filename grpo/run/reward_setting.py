"""Read the setting `reward`, such as judge:1,my.py:f:0.5."""

import math
import re

from data.user_mistake import Mistake

NAME = r"(?:.+\.pt|(?:.+\.py:)?[^\W\d]\w*)"
PART = re.compile(rf"({NAME})(?::(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))?")


def parse_reward(text: str) -> dict[str, float]:
    """Turn "judge:1,my.py:f:0.5" into {"judge": 1.0, "my.py:f": 0.5}, or raise a Mistake."""
    weights = {}
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        weight = float(match[2] or 1) if match else math.nan
        if not math.isfinite(weight) or match[1] in weights:
            raise Mistake(
                f"reward={text!r} has a part {part!r} that is not allowed; write NAME or"
                " NAME:WEIGHT, with each NAME only once. A NAME is judge, a rule such as correct,"
                " FILE.py:FUNCTION or JUDGE.pt"
            )
        weights[match[1]] = weight
    return weights
