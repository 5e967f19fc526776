"""Check grpo/tokens.py against loops, and that what comes after the end never matters."""

import copy

import pytest
import torch

from grpo import tokens
from grpo.tokens import END, encode
from model.transformer import TransformerConfig

BETA, CLIP = 0.3, 0.2
TEXTS = [
    "10=4+6......",
    "31=14+10+7..",
    "55=1+1+1+1+1",
]  # of 4 and 8 tokens, and one without an end
LENGTHS = [4, 8, 9]


@pytest.fixture
def model():
    """Make a network with random weights, which takes texts longer than L, too."""
    torch.manual_seed(0)
    made = tokens.Causal(TransformerConfig(len(tokens.VOCABULARY), 20, 1, 2, 16))
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made


def loss_by_loops(now, old, ref, A, average):
    """Take the sum over each completion's own tokens, one at a time."""
    sums = []
    for i, length in enumerate(LENGTHS):
        total = 0.0
        for t in range(tokens.P - 1, tokens.P - 1 + length):
            ratio, r = (now[i, t] - old[i, t]).exp(), (ref[i, t] - now[i, t]).exp()
            objective = min(ratio * A[i], min(max(ratio, 1 - CLIP), 1 + CLIP) * A[i])
            total += BETA * (r - 1 - r.log()) - objective
        sums.append(total)
    if average == "completion":
        return sum(total / length for total, length in zip(sums, LENGTHS)) / len(sums)
    if average == "token":
        return sum(sums) / sum(LENGTHS)
    return sum(sums) / (len(sums) * (tokens.L - 1))


@pytest.mark.parametrize("average", ["completion", "token", "constant"])
def test_the_loss_equals_loops(average):
    torch.manual_seed(0)
    now, old, ref = (torch.randn(3, tokens.L - 1) / 2 - 2 for _ in range(3))
    A = torch.tensor([[1.5], [-0.5], [-1.0]])
    mask = tokens.completion_mask(encode(TEXTS))
    loss = tokens.token_loss(now, old, ref, A, mask, BETA, CLIP, average)
    assert torch.allclose(loss, loss_by_loops(now, old, ref, A[:, 0], average))


def test_log_probs_are_of_the_next_token(model):
    """Score the prefixes one by one: a token's probability depends on what's before it only."""
    texts = encode(TEXTS)
    found = tokens.log_probs(model, texts)
    for t in range(1, tokens.L):
        last = model(texts[:, :t])[:, -1].log_softmax(dim=-1)
        assert torch.allclose(found[:, t - 1].float(), last[range(3), texts[:, t]], atol=1e-5)


@pytest.mark.parametrize("average", ["completion", "token"])
def test_more_padding_changes_nothing(average, model):
    """Neither the loss nor its gradient does, though the padding is of the end's own token."""
    found = []
    for padding in (0, 5):
        texts = torch.nn.functional.pad(encode(TEXTS[:2]), (0, padding), value=END)
        now, mask = tokens.log_probs(model, texts), tokens.completion_mask(texts)
        old, ref = now.detach() - 0.1, now.detach() + 0.2
        model.zero_grad()
        A = torch.tensor([[1.0], [-1.0]])
        loss = tokens.token_loss(now, old, ref, A, mask, BETA, CLIP, average)
        loss.backward()
        found.append([loss.item(), *(p.grad.clone() for p in model.parameters())])
    assert found[0][0] == pytest.approx(found[1][0])
    for a, b in zip(found[0][1:], found[1][1:]):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_mask_has_the_end_and_nothing_after_it():
    mask = tokens.completion_mask(encode(TEXTS))
    for row, length in zip(mask.tolist(), LENGTHS):
        start = tokens.P - 1  # the column of the first token after the prompt
        assert row == [start <= t < start + length for t in range(tokens.L - 1)]


def test_no_gradient_reaches_what_comes_after_the_end():
    torch.manual_seed(0)
    now = torch.randn(3, tokens.L - 1, requires_grad=True)
    mask = tokens.completion_mask(encode(TEXTS))
    A = torch.ones(3, 1)
    tokens.token_loss(now, now.detach(), now.detach() - 1, A, mask).backward()
    assert ((now.grad != 0) == mask).all()


def test_what_was_drawn_has_the_probability_that_log_probs_says(model):
    """Draw the same prompt's completion many times, and count how often it begins with a pair."""
    n = 2000
    uniforms = torch.rand(n, 2, generator=torch.Generator().manual_seed(0))
    drawn = tokens.generate(model, encode(["88="] * n), uniforms)  # (n,5)
    log_q = tokens.log_probs(model, drawn)[:, 2:].sum(dim=1)  # (n,) of both tokens
    counted = 0
    for text in drawn.unique(dim=0):
        if text[3] != END:
            same = (drawn == text).all(dim=1)
            q = log_q[same][0].exp().item()
            assert abs(same.double().mean().item() - q) < 5 * (q / n) ** 0.5
            counted += 1
    assert counted > 20


def test_after_the_end_there_is_only_padding(model):
    drawn = tokens.generate(model, *tokens.draw_batch([10, 88], (0, 0)))
    ended = (drawn == END).cumsum(dim=1) > 0
    assert ended.any() and (drawn[ended] == END).all()


def test_in_the_first_update_the_ratio_is_1(model, monkeypatch):
    """Then the loss is minus the mean advantage, plus the KL. In the second one, it has moved."""
    seen = []

    def loss(now, old, *others, **settings):
        seen.append((now - old).abs().max().item())
        return tokens_loss(now, old, *others, **settings)

    tokens_loss = tokens.token_loss
    monkeypatch.setattr(tokens, "token_loss", loss)
    monkeypatch.setattr(tokens, "reward", lambda texts: (texts[:, 3] % 2).float())
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = tokens.draw_batch([10, 20, 88], (0, 0))
    tokens.grpo_step(model, copy.deepcopy(model), adamw, *batch)
    assert seen[0] < 1e-6 < 1e-3 < seen[1]


def test_the_rule():
    for text in ["88=41+47....", "88=6+61+21..", "10=1+9......"]:
        assert tokens.is_correct(text)
    wrong = (
        "88=88....... 88=41+48.... 88=041+47... 88=41+47+0.. 88=41++47... 88=41+47+1+1 88=+88......"
    )
    for text in [*wrong.split(), "88=4+4+40+40"]:  # the last one has no end
        assert not tokens.is_correct(text), text


def test_no_number_is_both_trained_on_and_held_out():
    assert len(tokens.TRAINING) == 72
    assert not {*tokens.TRAINING} & {*tokens.CHOOSING, *tokens.HELD_OUT}
    assert not {*tokens.CHOOSING} & {*tokens.HELD_OUT}


def test_a_run_learns(monkeypatch):
    """Let a tiny network learn from scratch to stop after four tokens."""
    monkeypatch.setattr(tokens, "reward", lambda texts: (texts[:, 6] == END).float())
    monkeypatch.setattr(tokens, "STEPS", 40)
    monkeypatch.setattr(tokens, "B", 4)
    torch.manual_seed(0)
    policy = tokens.Causal(TransformerConfig(len(tokens.VOCABULARY), tokens.L, 1, 2, 16))
    reference = copy.deepcopy(policy)
    before = tokens.evaluate(policy, tokens.HELD_OUT)[1]
    for _ in tokens.train(policy, reference, rate=2e-2):
        pass
    assert before < 0.5 and tokens.evaluate(policy, tokens.HELD_OUT)[1] > 0.9
