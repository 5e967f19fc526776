import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.dataset import Dataset
from grpo.plumbing.checkpoint import load_model, read
from grpo.plumbing.config import load_config
from model import pretrain
from model.losses import generator_loss, judge_loss, masked_batch
from model.report import auc, report
from model.transformer import Generator, Judge, TransformerConfig, rotary_table, rotate

SHAPE = TransformerConfig(vocab_size=9, block_size=12, n_layer=2, n_head=2, n_embd=32)
TOKENS = torch.randint(8, (3, 12), generator=torch.Generator().manual_seed(0))


def test_rotation_sees_distances_only():
    torch.manual_seed(0)
    cos, sin = rotary_table(12, 16)
    q = rotate(torch.randn(16).expand(12, 16), cos, sin)
    k = rotate(torch.randn(16).expand(12, 16), cos, sin)
    torch.testing.assert_close(q[2] @ k[5], q[7] @ k[10])
    assert abs(q[2] @ k[5] - q[2] @ k[6]) > 1e-3


def test_every_position_sees_every_other():
    torch.manual_seed(0)
    for model in (Generator(SHAPE), Judge(SHAPE)):
        torch.nn.init.normal_(model.head.weight)
        x = model.trunk.embedding(TOKENS[:1]).detach().requires_grad_()
        model.trunk.embedding.forward = lambda tokens, x=x: x
        out = model(TOKENS[:1])[0]
        for t in (0, 11):
            grad = torch.autograd.grad(out[t].flatten()[:8].sum(), x, retain_graph=True)[0]
            assert (grad[0].abs().sum(dim=-1) > 0).all()


def test_a_blank_is_never_filled_with_a_blank():
    logits = Generator(SHAPE)(TOKENS)
    assert logits.shape == (3, 12, 9)
    assert (logits[..., 8] == float("-inf")).all()
    assert logits[..., :8].isfinite().all()


def test_training_mode_changes_nothing():
    """No dropout: what is sampled is what is differentiated."""
    model = Generator(SHAPE)
    assert torch.equal(model.train()(TOKENS), model.eval()(TOKENS))


def test_padding_is_never_attended_to():
    """A short input gives the same, alone or padded to any length."""
    torch.manual_seed(0)
    for model in (Generator(SHAPE), Judge(SHAPE)):
        torch.nn.init.normal_(model.head.weight)
        alone = model(TOKENS[:, :7])
        model.trunk.padded = True
        padded = F.pad(TOKENS[:, :7], (0, 5), value=-1)
        torch.testing.assert_close(model(padded)[:, :7], alone, rtol=1e-5, atol=1e-5)


def runs_of(mask):
    """Of each input the runs of its blanks, as slices."""
    texts = ["".join(".x"[blank] for blank in row) for row in mask.tolist()]
    return [[slice(*run.span()) for run in re.finditer("x+", text)] for text in texts]


@pytest.mark.parametrize("K", [1, 2])
def test_the_generators_loss_is_nats_of_a_hidden_character(world, K):
    """Of letters that are alike everywhere; with a latent, of each run the sum over z."""
    train = Dataset(world / "text", "train")
    args = pretrain.parse(["--block_size=16", "--batch_size=50"])
    q = torch.rand(K, 28, generator=torch.Generator().manual_seed(0))
    q[:, 27] = 0
    q /= q.sum()  # (K,V) of z and a letter
    seen = []

    def generator(masked):
        seen.append(masked)
        return q.log().squeeze(0).expand(*masked.shape, *q.squeeze(0).shape)

    loss = generator_loss(generator, train, args, (1, 2))
    tokens, mask = masked_batch(train, args, args.masking, (1, 2))
    assert torch.equal(seen[0], tokens.masked_fill(mask, 27))
    prior = q.sum(dim=1)  # (K,)
    nats = 0
    for text, runs in zip(tokens, runs_of(mask)):
        for run in runs:
            letters = (q / prior[:, None])[:, text[run]]  # (K,n)
            nats -= (prior * letters.prod(dim=1)).sum().log()
    torch.testing.assert_close(loss, nats / mask.sum())


Z = 26  # a letter that the tiny text does not have: a run is drawn if it is all z


def mostly_z(masked):
    return F.one_hot(torch.full_like(masked, Z), 28).float()


def judged(world, judge, seed=(1,)):
    """-> the judge's loss, what it read, the text and its blanks, (B,T) each."""
    train = Dataset(world / "text", "train")
    args = pretrain.parse(["--block_size=16", "--batch_size=200", "--judge_masking=word,random"])
    read = []
    loss = judge_loss(lambda x: read.append(x) or judge(x), mostly_z, train, args, 0.01, seed)
    return loss, read[0], *masked_batch(train, args, args.judge_masking, seed)


def test_inputs_of_every_difficulty(world):
    """Of ten rows four are partly revealed: blanks between text inside one word."""
    train = Dataset(world / "text", "train")
    args = pretrain.parse(["--batch_size=2000", "--masking=word"])
    tokens, mask = masked_batch(train, args, args.masking, (1, 2))
    words = torch.from_numpy(np.isin(tokens.numpy(), train.spaces)).cumsum(dim=1)  # (B,T)
    hidden = torch.zeros_like(words).scatter_add_(1, words, mask.long())  # (B,words)
    letters = torch.zeros_like(words).scatter_add_(1, words, torch.ones_like(words))
    partly = ((0 < hidden) & (hidden < letters - 1)).any(dim=1)  # a space is none
    assert 0.25 < partly.float().mean() < 0.4  # some lose all, or none
    assert set((hidden > 0).sum(dim=1).tolist()) == {0, 1, 2, 3, 4, 5}


def some_judge(tokens):
    return torch.sin(3.0 * tokens) * 3


def test_the_judge_reads_runs_that_are_text_and_runs_that_are_drawn(world):
    """Each by its own coin; what is visible is text. Another seed, other runs."""
    _, read, tokens, mask = judged(world, some_judge)
    assert torch.equal(read[~mask], tokens[~mask])
    labels = []
    for row, text, runs in zip(read, tokens, runs_of(mask)):
        labels.append([torch.equal(row[run], text[run]) for run in runs])
        assert all(real or (row[run] == Z).all() for real, run in zip(labels[-1], runs))
    assert 0.4 < np.mean(sum(labels, [])) < 0.6
    assert any(len(set(each)) == 2 for each in labels)
    assert torch.equal(judged(world, some_judge)[1], read)
    assert not torch.equal(judged(world, some_judge, seed=(2,))[1], read)


def test_the_judges_loss_by_hand(world):
    """A label and a mean logit a run; the mean over blanks, then over the inputs that have any."""
    loss, read, _, mask = judged(world, some_judge)
    of_inputs = []
    for row, runs in zip(read, runs_of(mask)):
        losses = []
        for run in runs:
            logit = some_judge(row[run]).mean()
            chance = logit.sigmoid() if row[run][0] != Z else (-logit).sigmoid()
            losses += [-chance.log()] * len(row[run])
        if losses:
            of_inputs.append(sum(losses) / len(losses))
    assert len(of_inputs) < 200  # some have none
    torch.testing.assert_close(loss, sum(of_inputs) / len(of_inputs))


class Pairs:
    """A text of two characters, 0 or 1, which are alike nine times in ten; one is hidden."""

    mask_id = 2

    def batch(self, size, block_size, masking, ratio, words, seed):
        rng = np.random.default_rng(seed)
        first = rng.integers(2, size=size)
        pairs = np.stack([first, first ^ (rng.random(size) < 0.1)], axis=1)
        hidden = rng.integers(2, size=(size, 1)) == [0, 1]
        return torch.from_numpy(pairs), torch.from_numpy(hidden)


def test_the_best_judge_says_the_log_of_text_over_generator():
    """The generator's other character is either, half and half: p/q is 0.9/0.5 or 0.1/0.5."""
    args = pretrain.parse(["--batch_size=20000"])

    def generator(masked):
        return torch.tensor([0.0, 0.0, -torch.inf]).expand(*masked.shape, 3)

    def loss_of(scale, shift=0.0):
        def judge(pairs):
            alike = pairs[:, :1] == pairs[:, 1:]
            return (scale * torch.where(alike, 1.8, 0.2).log() + shift).expand(pairs.shape)

        return judge_loss(judge, generator, Pairs(), args, 1.0, (1,)).item()

    assert loss_of(scale=0) == pytest.approx(np.log(2))
    best = -0.5 * (0.9 * np.log(0.9 / 1.4) + 0.1 * np.log(0.1 / 0.6))
    best -= 0.5 * (0.5 * np.log(0.5 / 1.4) + 0.5 * np.log(0.5 / 0.6))
    assert loss_of(scale=1) == pytest.approx(best, abs=0.01) and best < np.log(2) - 0.09
    for scale, shift in ((0.5, 0), (2, 0), (1, 0.5), (1, -0.5)):
        assert loss_of(scale, shift) > loss_of(scale=1) + 0.01


def test_auc_is_over_all_pairs():
    real = torch.tensor([3.0, 1.0])
    fake = torch.tensor([2.0, 0.0])
    assert auc(real, fake) == 0.75
    assert auc(real, real) == 0.5  # a tie is half a pair


def test_the_report_of_models_that_know_nothing_and_of_a_judge_that_knows_the_text(world, capsys):
    val = Dataset(world / "text", "val")
    text = val.decode(val.tokens)

    def generator(masked):
        return F.pad(torch.zeros(*masked.shape, 27), (0, 1), value=float("-inf"))  # (B,T,V)

    def judge(rows):
        known = [[1.0 if val.decode(row) in text else -1.0] * 16 for row in rows]
        return torch.tensor(known)  # (B,T)

    report(generator, judge, val, pretrain.parse(["--block_size=16"]), size=64)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for line in lines:
        figures = line.split(": ")[1].split()
        figures = dict(zip(figures[::2], map(float, figures[1::2])))
        assert figures["nats"] == pytest.approx(np.log(27), abs=1e-3)
        assert figures["auc"] > 0.98


def small(world, *more):
    sizes = ["--block_size=16", "--n_layer=1", "--n_embd=32", "--batch_size=16", "--device=cpu"]
    return [f"--dataset={world / 'text'}", *sizes, *more]


def test_pretraining_learns_resumes_and_reports(world, tmp_path, capsys, monkeypatch):
    """From random weights to two files.

    Stopped by Ctrl-C in the midst of each model and resumed, it writes the same weights.
    """
    monkeypatch.setattr(pretrain, "SAVE_INTERVAL", 20)
    monkeypatch.chdir(tmp_path)
    arguments = small(world, "--generator_steps=100", "--judge_steps=40")
    pretrain.main([*arguments, "--out_dir=whole"])
    shown = capsys.readouterr().out
    restored = shown.splitlines()[0].split("characters ")[1]
    assert float(restored[:5]) > 0.15  # 27 characters: chance is 0.04

    for name, step in (("generator_loss", 50), ("judge_loss", 30)):
        loss_of = getattr(pretrain, name)

        def interrupted(*arguments, loss_of=loss_of, step=step):
            if arguments[-1][-1] == step:
                os.kill(os.getpid(), signal.SIGINT)
            return loss_of(*arguments)

        monkeypatch.setattr(pretrain, name, interrupted)
        with pytest.raises(SystemExit, match="130"):
            pretrain.main([*arguments, "--out_dir=parts", "--resume"])
        monkeypatch.setattr(pretrain, name, loss_of)
        message = capsys.readouterr().err.splitlines()[-1]
        assert f"stopped after step {step + 1} of" in message
        assert message.endswith("the same command with --resume goes on")
    with pytest.raises(SystemExit, match="2"):
        pretrain.main([*arguments, "--out_dir=parts", "--resume", "--seed=2"])
    assert "was made with {" in capsys.readouterr().err.splitlines()[-1]
    pretrain.main([*arguments, "--out_dir=parts", "--resume"])
    for name in ("generator.pt", "judge.pt"):
        whole = read(Path("whole") / name)["weights"]
        parts = read(Path("parts") / name)["weights"]
        assert all(torch.equal(weight, parts[key]) for key, weight in whole.items())


@pytest.mark.parametrize("layers", (1, 3))
def test_a_judge_starts_as_the_first_layers_of_its_generator(layers, world, tmp_path, monkeypatch):
    """It may have fewer layers, or more. The generator may come from a file."""
    monkeypatch.setattr(pretrain, "report", lambda *_: None)
    arguments = small(world, "--n_layer=2", "--generator_steps=0", "--judge_steps=0")
    pretrain.main([*arguments, f"--out_dir={tmp_path / 'a'}"])
    more = [f"--start={tmp_path / 'a' / 'generator.pt'}", f"--judge_layers={layers}", "--seed=2"]
    pretrain.main([*arguments, *more, f"--out_dir={tmp_path / 'b'}"])
    start = read(tmp_path / "a" / "generator.pt")["weights"]
    generator = read(tmp_path / "b" / "generator.pt")["weights"]
    assert all(torch.equal(weight, generator[key]) for key, weight in start.items())
    judge = read(tmp_path / "b" / "judge.pt")
    assert judge["architecture"]["n_layer"] == layers
    assert not judge["weights"]["head.weight"].any()
    common = [key for key in judge["weights"] if key.startswith("trunk.") and key in start]
    assert len({key.split(".")[2] for key in common if "blocks" in key}) == min(layers, 2)
    assert all(torch.equal(judge["weights"][key], start[key]) for key in common)


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_the_judge_learns_from(goes_on, world, tmp_path, monkeypatch):
    """The generator's draws, hot at first; one that goes on: a policy's, too, never hot."""
    calls = []
    monkeypatch.setattr(pretrain, "report", lambda *_: None)
    monkeypatch.setattr(
        pretrain, "judge_loss", lambda *given: calls.append(given) or judge_loss(*given)
    )
    models = [f"--start={world}/generator.pt", "--n_latent=3", "--generator_steps=0"]
    models += [f"--start_judge={world}/judge.pt", f"--policy={world}/mixture.pt"] * goes_on
    pretrain.main(small(world, *models, "--judge_steps=4", f"--out_dir={tmp_path}"))
    assert read(tmp_path / "generator.pt")["architecture"]["n_latent"] == 3
    sources = [given[1] for given in calls]
    assert sources[0] is sources[2] and sources[1] is sources[3]
    assert (sources[0] is not sources[1]) == goes_on
    assert [given[4] for given in calls] == ([1] * 4 if goes_on else [2, 1.5, 1, 1])


def test_a_judge_that_goes_on_begins_as_it_was(world, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "report", lambda *_: None)
    models = [f"--start={world}/generator.pt", f"--start_judge={world}/judge.pt"]
    steps = ["--generator_steps=0", "--judge_steps=0"]
    pretrain.main(small(world, *models, *steps, f"--out_dir={tmp_path}"))
    written = read(tmp_path / "judge.pt")["weights"]
    for key, weight in read(world / "judge.pt")["weights"].items():
        assert torch.equal(written[key], weight.half())


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--judge_masking=words", "masking='words' has a part 'words'; it takes"),
        ("--n_embd=100", "--n_embd=100 is not allowed; it takes a multiple of 32"),
        ("--n_layer=two", "--n_layer: invalid int value: 'two'"),
        ("--dtype=float16", "choose from 'float32', 'bfloat16'"),
        ("--masking=world", "masking='world' has a part 'world'; it takes"),
        ("--start={world}/judge.pt", "holds a judge, a generator is needed"),
        ("--dataset={world}/none", "prepare.py --input=FILE --out_dir="),
    ],
)
def test_a_mistake_in_a_flag(flags, message, world, tmp_path, capsys):
    flags = flags.format(world=world).split()
    with pytest.raises(SystemExit, match="2"):
        pretrain.main([*small(world), *flags, f"--out_dir={tmp_path / 'out'}"])
    error = capsys.readouterr().err
    assert error.startswith("pretrain: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(path.name for path in Path("config").glob("*.py")))
def test_the_models_of_every_experiment_ship(name):
    config = load_config(["config/grpo_config.py", f"config/{name}"])
    for kind in ("generator", "judge"):
        path = Path(getattr(config, f"{kind}_checkpoint"))
        assert path.stat().st_size <= 4e6
        load_model(path, kind, " abcdefghijklmnopqrstuvwxyz_")
