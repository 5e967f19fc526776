"""Check what a reward of the user's own gets, and what the setting `reward` refuses."""

from types import SimpleNamespace

import pytest
import torch

from data.user_mistake import Mistake
from grpo.batch import make_batch
from grpo.run.reward_setting import make_rewards
from grpo.run.user_file import own_reward

COMPLETIONS = torch.arange(24).view(2, 3, 4)  # (B,G,T)
MASK = torch.tensor([[True, True, False, True], [False, True, False, True]])  # (B,T)
BATCH = make_batch(COMPLETIONS[:, 0], MASK, MASK.long(), 3, (5, 17))  # of seed 5, step 17


def test_an_own_reward_gets_the_step_and_with_kwargs_all_there_is():
    completions, batch = COMPLETIONS, BATCH
    seen = {}

    def curriculum(step, completions):
        return completions.sum(dim=-1) * step

    def everything(completions, **more):
        seen.update(more)
        return completions.sum(dim=-1)

    have = own_reward("curriculum", curriculum, completions, batch)
    assert torch.equal(have, 17.0 * completions.sum(dim=-1))
    own_reward("everything", everything, completions, batch)
    assert {*seen} == {"masked", "mask", "decode", "words", "step"}
    assert seen["step"] == 17 and torch.equal(seen["words"], batch.words)
    own_reward(
        "everything", lambda **all: seen.update(all) or all["completions"], completions, batch
    )
    assert torch.equal(seen["completions"], completions)


def test_a_wrong_shape_is_reported_next_to_what_the_function_was_given():
    line = r"shape \(2,\) for completions of the shape \(B, G, T\) = \(2, 3, 4\); return \(B, G\)"
    with pytest.raises(Mistake, match=line):
        own_reward("flat", lambda mask: [1, 2], COMPLETIONS, BATCH)


def test_a_rule_that_does_not_fit_the_data_set_is_one_line():
    words = SimpleNamespace(name="valid_words")
    for rule, allowed in ((None, "FILE.py:FUNCTION$"), (words, "FUNCTION, valid_words$")):
        with pytest.raises(Mistake, match=f"reward=right: this dataset .*{allowed}"):
            make_rewards("right", None, rule, None)


def test_a_parameter_that_nothing_fills_is_one_line():
    with pytest.raises(Mistake, match="reward f failed: TypeError: .*'texts'"):
        own_reward("f", lambda texts: texts, COMPLETIONS, BATCH)
