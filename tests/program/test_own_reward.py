"""Check what a reward of the user's own gets, and what the setting `reward` refuses."""

from types import SimpleNamespace

import pytest
import torch

from data.user_mistake import Mistake
from grpo.batch import make_batch
from grpo.run.config import Config
from grpo.run.load import load_rewards
from grpo.run.user_file import user_reward

COMPLETIONS = torch.arange(24).view(2, 3, 4)  # (B,G,T)
MASK = torch.tensor([[True, True, False, True], [False, True, False, True]])  # (B,T)
BATCH = make_batch(COMPLETIONS[:, 0], MASK, MASK.long(), 3, (5, 17))  # of seed 5, step 17


def test_an_own_reward_gets_the_completions_and_their_batch():
    def curriculum(completions, batch):
        assert torch.equal(batch.words, BATCH.words)
        return completions.sum(dim=-1) * batch.seed[-1]

    have = user_reward("curriculum", curriculum, COMPLETIONS, BATCH)
    assert torch.equal(have, 17.0 * COMPLETIONS.sum(dim=-1))


def test_a_wrong_shape_is_reported_next_to_what_the_function_was_given():
    line = r"shape \(2,\) for completions of the shape \(B, G, T\) = \(2, 3, 4\); return \(B, G\)"
    with pytest.raises(Mistake, match=line):
        user_reward("flat", lambda completions, batch: [1, 2], COMPLETIONS, BATCH)


def test_a_rule_that_does_not_fit_the_data_set_is_one_line():
    words = SimpleNamespace(name="valid_words")
    for rule, allowed in ((None, "FILE.py:FUNCTION$"), (words, "FUNCTION, valid_words$")):
        with pytest.raises(Mistake, match=f"reward=correct: this dataset .*{allowed}"):
            load_rewards(Config(reward="correct"), None, rule, None)
