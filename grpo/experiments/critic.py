"""A critic, which GRPO is known for leaving out: it predicts what an input will earn.

    python train_grpo.py config/rule.py --baseline=none --scale_rewards=none \\
        --reward=grpo/experiments/critic.py:successes --kl_beta=0.02

PPO's baseline (1707.06347) is V(x), learned beside the policy, where GRPO's is the mean of a group.
All characters of a completion are drawn at once, so V is one number for each input, and there's
nothing to discount.

Shapes: B masked inputs, T characters, G completions of each.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo.batch import Batch
from grpo.experiments import rewards
from grpo.reward import mean_over_blanks
from grpo.run.checkpoint import load_model
from model.transformer import Generator, Judge

generator = load_model("model/pretrained/sums.pt", Generator)
critic = Judge(generator.trunk.config)  # a network like the judge's
critic.trunk.load_state_dict(generator.trunk.state_dict())  # from the base model's features, too
optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0)


def advantage(completions: Tensor, batch: Batch, reward) -> Tensor:
    """Pay what `reward` pays, minus what the critic expected: -> (B,G).

    The critic predicts first. Then it learns from this step's rewards, by their squared error,
    unless somebody only measures, without gradients. No checkpoint holds it, so a resumed run
    begins with a new one.
    """
    earned = reward(completions, batch)  # (B,G)
    expected = mean_over_blanks(critic(batch.masked)[:, None], batch.mask)  # (B,1)
    if torch.is_grad_enabled():  # the table's inputs are held out, so it may not learn from them
        F.mse_loss(expected.expand_as(earned), earned).backward()
        optimizer.step()
        optimizer.zero_grad()
    return earned - expected.detach()


successes = partial(advantage, reward=rewards.successes)
# the same, with rewards whose zero or unit changes from input to input
constant = partial(advantage, reward=rewards.constant)
predictable = partial(advantage, reward=rewards.predictable)
unit = partial(advantage, reward=rewards.unit)
both = partial(advantage, reward=rewards.both)
