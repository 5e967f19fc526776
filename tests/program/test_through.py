"""Check grpo.experiments.through on one sum and a tiny judge, where all can be enumerated.

Shapes: n = 2 blanks, V vocabulary.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import BLANK, encode, make_batch, write_lines

from data.dataset import read_splits
from data.sums.prepare import draw_sums
from data.vocabulary import VOCABULARY
from grpo.experiments import through
from grpo.run.checkpoint import load_model
from grpo.run.config import Config
from model.transformer import Generator, Judge, TransformerConfig

V = len(VOCABULARY)
TOKENS, MASK = encode("41+47=88"), encode("4_+4_=88") == BLANK
BATCH = make_batch(TOKENS, MASK, BLANK, 1, (1, 1))


@pytest.fixture(scope="module")
def judge():
    torch.manual_seed(0)
    judge = Judge(TransformerConfig(vocab_size=V, block_size=8, n_layer=2, n_head=2, n_embd=32))
    for weights in judge.parameters():
        weights.data.mul_(3)
    torch.nn.init.normal_(judge.head.weight)  # with its initial zeros, all scores are equal
    return judge.requires_grad_(False)


@pytest.fixture
def log_q():
    """Make a policy of a logit for each digit, and return its log q (n,V)."""
    logits = torch.full((2, V), -1e9)
    logits[:, through.DIGITS] = torch.randn(2, 10, generator=torch.Generator().manual_seed(1))
    return logits.log_softmax(dim=-1).requires_grad_()


def score(judge, texts):
    return judge(texts)[:, MASK[0]].mean(dim=-1)


def test_asking_has_the_gradient_of_the_expected_score(judge, log_q):
    """Average it over all 100 draws, and compare with the sum over them."""
    q = log_q.exp()  # (n,V)
    expected, asked = 0, 0
    for digits in itertools.product(through.DIGITS, repeat=2):
        filled = TOKENS.masked_scatter(MASK, torch.stack(digits))
        p = q[0, digits[0]] * q[1, digits[1]]
        expected = expected + p * score(judge, filled)[0]
        c = through.asking(judge, filled, MASK)  # (n,10)
        asked = asked + p.detach() * (q[:, through.DIGITS] * c).sum()
    (want,) = torch.autograd.grad(expected, log_q, retain_graph=True)
    (found,) = torch.autograd.grad(asked, log_q)
    want, found = (g[:, through.DIGITS] for g in (want, found))
    assert want.abs().max() > 0.01
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


def test_straight_is_the_gradient_of_straight_through(judge, log_q):
    """Write it the usual way: hard one-hot vectors forward, probabilities backward."""
    q = log_q.exp()  # (n,V)
    soft = torch.zeros(1, 8, V).masked_scatter(MASK[..., None], q)  # (1,8,V)
    vectors = F.one_hot(TOKENS, V) + soft - soft.detach()
    embedding = judge.trunk.embedding
    hook = embedding.register_forward_hook(lambda module, *_: vectors @ module.weight)
    usual = score(judge, TOKENS)[0]
    hook.remove()
    torch.testing.assert_close(usual, score(judge, TOKENS)[0])
    (want,) = torch.autograd.grad(usual, log_q, retain_graph=True)
    c = through.straight(judge, TOKENS, MASK)  # (n,10)
    (found,) = torch.autograd.grad((q[:, through.DIGITS] * c).sum(), log_q)
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


def test_the_loss_is_a_kl_minus_what_the_blanks_can_expect(log_q):
    rows = torch.zeros(1, 8, V).masked_scatter(MASK[..., None], log_q)  # (1,8,V)

    def policy(masked):
        return SimpleNamespace(log_marginals=lambda: rows)

    log_ref = log_q.detach().flip(0)
    c = torch.randn(2, 10, generator=torch.Generator().manual_seed(2))  # (n,10)
    loss = through.loss(policy, log_ref, c, BATCH, Config(kl_beta=0.5))
    want = 0
    for q, ref, worth in zip(log_q, log_ref, c):
        kl = sum(q.exp() * (q - ref))
        want = want + (0.5 * kl - q[through.DIGITS].exp() @ worth) / 2
    torch.testing.assert_close(loss, want)


@pytest.fixture
def sums(monkeypatch, tmp_path):
    """Let the command read a few sums in the place of 200,000."""
    lines = [draw_sums(results, 3, 200, seed=1) for results in ([500, 701], [600])]
    splits = read_splits(write_lines(tmp_path, *lines), "val", 11)
    monkeypatch.setattr(through, "load_splits", lambda config, vocab_size: splits)


@pytest.mark.parametrize("method", through.OPINIONS)
def test_the_command_repeats_itself(sums, tmp_path, method):
    weights = []
    for name in ("first", "second"):
        flags = ["--max_iters=2", "--batch_size=4", f"--out_dir={tmp_path / name}"]
        through.main([method, *flags])
        network = load_model(tmp_path / name / "generator.pt", Generator)
        weights.append(torch.cat([w.flatten() for w in network.parameters()]))
    assert torch.equal(*weights)


def test_a_mistake_is_one_line(sums, tmp_path):
    for words in ([], ["guess"], ["asking", f"--out_dir={tmp_path}"], ["straight", "--cut"]):
        with pytest.raises(through.Mistake):
            through.main(words)
