"""Check rewards. Shapes: B masked inputs, T characters, G completions of each."""

import math
from itertools import product

import pytest
import torch
from conftest import BLANK, encode, make_batch

from data.user_mistake import Mistake
from data.vocabulary import decode
from data.weights import parse_weights
from grpo.policy import Product
from grpo.reward import Rewards, chain, exact, judge_logits, judge_scores
from grpo.run.config import Config
from grpo.run.load import load_models, user_reward

MASK = encode("__a_", "a_aa") == BLANK  # (B,T)
BATCH = make_batch(torch.zeros_like(MASK).long(), MASK, BLANK, 3, (0,))


def some_judge(tokens):
    return tokens.float() - 2


def some_completions(*shape):
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("T", [1, 3, 4])  # the shorter, the more completions are equal
def test_logits_are_the_judges_whatever_the_batching(T):
    """There are more completions than are judged at once. Each different one is judged once."""
    completions, sizes = some_completions(7, 30, T), []

    def judge(tokens):
        sizes.append(len(tokens))
        return some_judge(tokens)

    assert torch.equal(judge_logits(judge, completions), some_judge(completions))
    assert sizes == [32] * math.ceil(len({*decode(completions)}) / 32)


def test_the_judges_score_is_its_mean_logit_over_the_blanks_within_8():
    """Only the mean is bounded: the third completion's logits are 28, -9 and -1."""
    first = [[5, 2, 9, 5], [2, 0, 9, 1], [30, -7, 9, 1]]
    second = [[9, 3, 9, 9], [9, 22, 9, 9], [9, -30, 9, 9]]
    have = judge_scores(some_judge, torch.tensor([first, second]), BATCH)
    assert have.tolist() == [[2, -1, 6], [1, 8, -8]]


def test_exact_pays_1_for_what_was_there():
    completions = BATCH.tokens[:, None].repeat(1, 3, 1)  # (B,G,T)
    completions[0, 1, 3] = 7
    assert exact(completions, BATCH).tolist() == [[1, 0, 1], [1, 1, 1]]


def test_chain_reads_blank_by_blank():
    """Each blank is filled in before the next one is read."""

    def reader(masked):
        """Make logits that depend on the whole input: (D,T,V) with V = 5."""
        seen = masked.cumsum(dim=1) + 2 * masked.sum(dim=1, keepdim=True)  # (D,T)
        logits = torch.sin(seen[..., None] * torch.arange(1.0, 6))
        return Product(logits, masked, masked == BLANK, Config(temperature=0.7))

    completions = some_completions(2, 3, 4).where(MASK[:, None], BATCH.masked[:, None])
    have = chain(reader, completions, BATCH)
    for b, j in product(range(2), range(3)):
        want, text = 0.0, BATCH.masked[b].clone()
        for t in MASK[b].nonzero().flatten():
            logits = reader(text[None]).logits
            text[t] = completions[b, j, t]
            want += (logits[0, t] / 0.7).softmax(dim=0)[text[t]].log().item()
        assert have[b, j].item() == pytest.approx(want, rel=1e-5)


def test_chain_is_of_the_model_as_pretrained_whatever_the_runs_settings(flags):
    completions = some_completions(2, 3, 4).where(MASK[:, None], BATCH.tokens[:, None])
    have = []
    for changes in ({"temperature": 1.0}, {"temperature": 0.3, "repetition_penalty": 3.0}):
        models = load_models(Config(**flags | changes), torch.device("cpu"))
        have.append(chain(models.reader, completions, BATCH))
    assert torch.equal(*have)


def test_the_reward_is_the_weighted_sum_of_its_parts():
    completions = some_completions(2, 3, 4)
    parts = {"first": (lambda y, _: y[..., 0], 2.0), "second": (lambda y, _: y[..., 1], -0.5)}
    reward, found = Rewards(parts)(completions, BATCH)
    first, second = completions[..., 0], completions[..., 1]
    assert torch.equal(reward, 2 * first - second / 2)
    assert torch.equal(found["first"], first) and torch.equal(found["second"], second)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 1), (3, 2)])
def test_an_own_reward_of_another_shape_is_a_mistake(shape):
    """A number for each character (B,G,T) won't do either."""
    with pytest.raises(Mistake, match="shape"):
        user_reward("own", lambda *_: torch.zeros(shape), some_completions(2, 3, 4), BATCH)


def test_a_reward_is_names_and_weights():
    have = parse_weights("reward", "judge.pt,judge:1e-2, my.py:f:-.5,a/b.pt:2.5e+1")
    assert have == {"judge.pt": 1.0, "judge": 0.01, "my.py:f": -0.5, "a/b.pt": 25.0}
