"""Read a setting that lists names with weights, such as short:0.8,word:0.2."""

import math

from data.user_mistake import Mistake


def parse_weights(setting: str, text: str) -> dict[str, float]:
    """Turn "judge,my.py:f:0.5" into {"judge": 1.0, "my.py:f": 0.5}, or raise a Mistake."""
    weights = {}
    for part in text.split(","):
        name, _, weight = part.strip().rpartition(":")
        try:
            number = float(weight)
        except ValueError:  # it's no number, so it's a part of the name
            name, number = part.strip(), 1.0
        if not name or name in weights or not math.isfinite(number):
            raise Mistake(
                f"{setting}={text}: {part!r} isn't allowed; write NAME or NAME:WEIGHT, and each"
                " NAME only once"
            )
        weights[name] = number
    return weights
