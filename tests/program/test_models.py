"""Check the networks, their losses, their evaluation report, and the training program."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Letters, same

from data.dataset import read_dataset
from data.rules import check
from data.vocabulary import MASK_ID
from grpo.batch import make_batch
from grpo.latent import Latent
from grpo.policy import Product
from grpo.run.checkpoint import load_model, read
from grpo.run.config import Config, load_config
from grpo.run.load import make_policy, place
from model import pretrain
from model.losses import generator_loss, judge_loss, masked_batch
from model.pretrain import Settings
from model.report import REPORT, report
from model.transformer import (
    Block,
    Generator,
    Judge,
    TransformerConfig,
    make_generator,
)

SHAPE = TransformerConfig(vocab_size=9, block_size=12, n_layer=2, n_head=2, n_embd=32, blank=8)
LATENT = TransformerConfig(9, 12, 2, 2, 32, n_latent=3, blank=8)
CPU = torch.device("cpu")
TOKENS = torch.randint(9, (3, 12), generator=torch.Generator().manual_seed(0))


def outputs(model, tokens):
    """Run the model: -> what it returns, as a list."""
    out = model(tokens)
    return list(out) if isinstance(out, tuple) else [out]


def test_padding_is_never_attended_to():
    """A short input gives the same output alone and padded."""
    torch.manual_seed(0)
    for model in (make_generator(SHAPE), make_generator(LATENT), Judge(SHAPE)):
        torch.nn.init.normal_(model.head.weight)
        alone = outputs(model, TOKENS[:, :7])
        padded = outputs(model, F.pad(TOKENS[:, :7], (0, 5), value=-1))
        found = [x[:, :7] for x in padded]  # z has fewer than 7 values, and keeps them all
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [SHAPE, LATENT])
def test_neither_training_mode_nor_recomputing_changes_anything(shape):
    """There is no dropout, so we differentiate the same outputs that we sample from."""
    model = make_generator(shape)
    out = outputs(model.eval(), TOKENS)
    assert same(outputs(model.train(), TOKENS), out)
    model.trunk.recompute = True
    assert same(outputs(model, TOKENS), out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_settings_of_the_machine_reach_the_network(monkeypatch, dtype):
    """bfloat16 is what the layers compute in, and recomputing runs every block once more."""
    calls = []
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda *given: calls.append(1) or forward(*given))
    for recompute in (False, True):
        calls.clear()
        config = Config(dtype=dtype, gradient_checkpointing=recompute)
        logits = make_policy(make_generator(SHAPE), config, CPU)(TOKENS).logits
        logits.float().sum().backward()
        assert len(calls) == (1 + recompute) * SHAPE.n_layer
    judge = Judge(SHAPE)
    votes = place(judge, config, CPU)(judge)(TOKENS)
    assert logits.dtype == votes.dtype == getattr(torch, dtype)


@pytest.fixture
def train(world):
    return read_dataset(world / "text" / "train.txt", 16)


def test_the_generators_loss_is_nats_of_a_hidden_character(train):
    """All blanks have the same probabilities. For each input we sum over the latent z."""
    args = Settings(block_size=16, batch_size=50, device="cpu")
    g = torch.Generator().manual_seed(0)
    prior, q = torch.rand(2, generator=g), torch.rand(2, 28, generator=g)
    prior, q = prior / prior.sum(), q / q.sum(dim=1, keepdim=True)  # π(z), q_z(v)

    def policy(masked):
        B, T = masked.shape
        logits = q.log().expand(B, T, 2, 28)
        return Latent(prior.log().expand(B, 2), logits, masked, masked == MASK_ID, Config())

    batch = masked_batch(train, args, args.masking, (1, 2), reveal=True)
    nats = 0
    for text, blanks in zip(batch.tokens, batch.mask):
        nats -= (prior * q[:, text[blanks]].prod(dim=1)).sum().log()
    torch.testing.assert_close(generator_loss(policy, batch), nats / batch.mask.sum())


def test_about_four_inputs_in_ten_get_hidden_text_back(train):
    args = Settings(block_size=16, batch_size=2000, device="cpu")
    mask, left = (masked_batch(train, args, args.masking, (1,), x).mask for x in (False, True))
    assert not (left & ~mask).any()
    # the others draw a chance from 0 to 1, with which all of n blanks stay 1/(n + 1) of the time
    want = 0.6 + 0.4 * (1 / (mask.sum(dim=1) + 1)).mean()
    share = (left == mask).all(dim=1).float().mean()
    torch.testing.assert_close(share, want, atol=0.03, rtol=0)


Z = 26  # the tiny text has no z, so blanks that hold z were drawn


def mostly_z(masked):
    logits = F.one_hot(torch.tensor(Z), 28).float()
    return Product(logits.expand(*masked.shape, -1), masked, masked == MASK_ID, Config())


def some_judge(tokens):
    return torch.sin(3.0 * tokens) * 3


def test_the_judges_loss_by_hand(train):
    """The blanks of an input hold what was there or what was drawn, with equal chance.

    Each blank has a loss. They're averaged over the blanks of an input, and then over the inputs.
    """
    args = Settings(block_size=16, batch_size=200, judge_masking="word,random", device="cpu")
    seen = []

    def judge(tokens):
        seen.append(tokens)
        return some_judge(tokens)

    loss = judge_loss(judge, mostly_z, train, args, 0.01, (1,))
    batch = masked_batch(train, args, args.judge_masking, (1,))
    assert torch.equal(seen[0][~batch.mask], batch.tokens[~batch.mask])
    labels, losses = [], []
    for row, text, blanks in zip(seen[0], batch.tokens, batch.mask):
        labels.append(torch.equal(row, text))
        assert labels[-1] or (row[blanks] == Z).all()
        logits = some_judge(row[blanks])
        losses.append(-F.logsigmoid(logits if labels[-1] else -logits).mean())
    torch.testing.assert_close(loss, sum(losses) / len(losses))
    assert 0.4 < np.mean(labels) < 0.6


def test_the_report_is_a_loop_over_inputs(world, capsys):
    """A judge likes some letters and the rule others, so they disagree in both directions."""
    dataset = read_dataset(world / "text" / "val.txt", 16)
    policy = make_policy(load_model(world / "generator.pt", Generator), Config(), CPU)
    likes = torch.randn(28, generator=torch.Generator().manual_seed(1))  # (V,)

    def judge(tokens):
        return likes[tokens] + 0.01 * tokens[:, :1]  # (N,T)

    rule = Letters("abcdefghijklmnop")
    report(policy, judge, dataset, rule, "short", CPU, size=64)
    printed = [float(x) for x in re.findall(r"-?[0-9]+\.[0-9]+", capsys.readouterr().out)]

    batch = make_batch(*dataset.batch(64, "short", (REPORT, 0)), 1, (REPORT, 0))
    mask, drawn = batch.mask, policy(batch.masked).sample(batch).completions[:, 0]  # each (N,T)
    nats = -policy(batch.masked).log_likelihood(batch.tokens[:, None]).sum() / mask.sum()
    votes, others = judge(batch.tokens), judge(drawn)  # each (N,T)
    loss = F.softplus(torch.cat([-votes[mask], others[mask]])).mean()
    real, other = ((x * mask).sum(dim=1) / mask.sum(dim=1) for x in (votes, others))  # each (N,)
    pairs = [float(a > b) + 0.5 * float(a == b) for a in real for b in other]
    dissent = [(v[m] <= 0).any().item() for v, m, score in zip(votes, mask, real) if score > 0]
    good = check(rule, drawn[:, None], batch.masked)[:, 0]  # (N,)
    shares = [(other[which] > 0).float().mean().item() for which in (good, ~good)]
    want = [nats.item(), loss.item(), np.mean(pairs), np.mean(dissent), *shares]
    assert printed == pytest.approx(want, abs=6e-3) and 0 < shares[0] < 1


@pytest.fixture
def pretrained(world, tmp_path):
    """Give a function that trains tiny models: -> the files that it writes, by name."""
    sizes = ["--block_size=16", "--n_layer=1", "--n_embd=32", "--batch_size=16", "--device=cpu"]

    def train(name, *more):
        out = tmp_path / name
        pretrain.main([f"--dataset={world / 'text'}", f"--out_dir={out}", *sizes, *more])
        return {path.stem: read(path) for path in out.iterdir()}

    return train


def test_pretraining_learns(world, capsys, pretrained):
    """Pretraining starts from random weights, or from a generator, and beats chance."""
    pretrained("a", "--generator_steps=100", "--judge_steps=10")
    nats = capsys.readouterr().out.splitlines()[0].split("nats ")[1]
    assert float(nats) < 2.9  # of 27 characters; equal chances are log 27 = 3.30
    begin = [f"--start={world}/generator.pt", "--n_latent=3", "--generator_steps=1"]
    files = pretrained("b", *begin, "--judge_steps=2")
    latents = {name: file["architecture"]["n_latent"] for name, file in files.items()}
    assert latents == {"generator": 3, "judge": 1}


def test_a_judge_starts_as_its_generator(world, monkeypatch, pretrained):
    """Its head begins with zeros, and the draws it reads are hot in the first half of the steps."""
    hot = []
    monkeypatch.setattr(pretrain, "report", lambda *_: None)
    monkeypatch.setattr(pretrain, "judge_loss", lambda *given: hot.append(given[4]))
    monkeypatch.setattr(pretrain, "fit", lambda *given: [*map(given[2], range(given[3]))])
    start = world / "generator.pt"
    files = pretrained("out", f"--start={start}", "--generator_steps=0", "--judge_steps=8")
    assert hot == [2, 1.75, 1.5, 1.25, 1, 1, 1, 1]
    judge, generator = files["judge"]["weights"], load_model(start, Generator).half().state_dict()
    assert not judge["head.weight"].any()
    trunk = [name for name in generator if name.startswith("trunk.")]
    assert trunk and same(*({name: x[name] for name in trunk} for x in (judge, generator)))


@pytest.mark.parametrize("name", sorted(path.name for path in Path("config").glob("*.py")))
def test_the_models_of_every_experiment_ship(name):
    config = load_config(["config/grpo_config.py", f"config/{name}"])
    for kind in (Generator, Judge):
        name = getattr(config, f"{kind.__name__.lower()}_checkpoint")
        if name:  # a rule needs no judge
            assert Path(name).stat().st_size <= 4e6
            load_model(name, kind)


def test_pretraining_that_diverges_ends_and_writes_no_model(tmp_path, monkeypatch, pretrained):
    monkeypatch.setattr(pretrain, "generator_loss", lambda *_: torch.tensor(torch.nan))
    with pytest.raises(FloatingPointError, match="generator: the loss of step 0 is nan"):
        pretrained("a")
    assert not (tmp_path / "a").exists()
