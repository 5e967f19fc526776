"""The figures of a step. Letters: B inputs, T characters, G completions."""

import math

import pytest
import torch
from conftest import BLANK, encode
from grpo.rollout import Inputs, Rollout
from test_loss import batch_of
from test_reward import decode

from grpo.logprobs import LogProbs
from grpo.metrics import StepMetrics, text_metrics
from grpo.reward import Rewards
from grpo.sampling import Fills


def test_approx_kl_is_that_from_the_draws_to_the_policy():
    """k3 of KL(old‖now), whose draws are old's: r − 1 − log r with r = now/old."""
    old = torch.zeros(1, 2, 1)  # (B,G,T)
    now = torch.tensor([[[2.0], [1.0]]]).log()
    nothing = torch.zeros(1, 1)
    batch = batch_of(torch.ones(1, 1, dtype=torch.bool), LogProbs(old, old, nothing, nothing), old)
    metrics = StepMetrics(Rewards({"judge": (None, 1.0)}, None), torch.zeros(1, 2, 1))
    metrics.add({"clipped": torch.tensor(0)}, LogProbs(now, old, nothing, nothing), batch, batch)
    metrics.updated(torch.tensor(1.0))
    have = metrics.result()
    assert have["approx_kl"].item() == pytest.approx((2 - 1 - math.log(2)) / 2)


def test_the_logged_words_are_of_each_inputs_own_completions():
    tokens = encode("so cat on so", "so cat on so")  # (2,T)
    mask = encode("so ___ on so", "so cat __ so") == BLANK
    fills = encode("so cat xx so", "so xxx xx so", "so xxx on so", "so xxx on so").view(2, 2, -1)
    inputs = Inputs(tokens, mask, tokens, None, None)
    rollout = Rollout(inputs, Fills(fills, None, mask), None, None, None, None)
    assert text_metrics(rollout, decode, {"cat", "on"}, cut=True) == {"valid_words": 3 / 4}
