"""Check the networks, their training data, their evaluation report, and the training program."""

import math
import os
import re
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.dataset import Dataset
from grpo.latent_policy import Latent
from grpo.plumbing.checkpoint import load_model, read
from grpo.plumbing.config import load_config
from grpo.plumbing.log import claim
from grpo.product_policy import Product
from grpo.sampling import Sampling
from model import pretrain
from model.losses import generator_loss, judge_loss, masked_batch
from model.pretrain import Settings
from model.report import auc, calibration, report
from model.transformer import (
    IMPOSSIBLE,
    Generator,
    Judge,
    TransformerConfig,
    rotary_table,
    rotate,
)

SHAPE = TransformerConfig(vocab_size=9, block_size=12, n_layer=2, n_head=2, n_embd=32)
LATENT = TransformerConfig(9, 12, 2, 2, 32, n_latent=3)
TOKENS = torch.randint(9, (3, 12), generator=torch.Generator().manual_seed(0))


def run(model, tokens, **options):
    """Run the model: -> a judge's logits, or a generator's logits of letters."""
    out = model(tokens, **options)
    return out[-1] if isinstance(out, tuple) else out


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
        out = run(model, TOKENS[:1])[0]
        for t in (0, 11):
            grad = torch.autograd.grad(out[t].flatten()[:8].sum(), x, retain_graph=True)[0]
            assert (grad[0].abs().sum(dim=-1) > 0).all()


def test_a_blank_is_never_filled_with_a_blank():
    (logits,) = Generator(SHAPE)(TOKENS)  # (B,T,V)
    assert (logits[..., 8] == float("-inf")).all() and logits[..., :8].isfinite().all()
    blank = TOKENS == 8
    prior, letters = Generator(LATENT)(TOKENS)  # (B,T,K), (B,T,K,V)
    assert prior.shape == (3, 12, 3) and letters.shape == (3, 12, 3, 9)
    assert (letters[blank][..., 8] == IMPOSSIBLE).all()
    assert not letters[~blank].any() and not prior[~blank].any()


@pytest.mark.parametrize("shape", [SHAPE, LATENT])
def test_neither_training_mode_nor_recomputing_changes_anything(shape):
    """There is no dropout, so we differentiate the same outputs that we sample from."""
    model = Generator(shape)
    out = run(model.eval(), TOKENS)
    for other in (run(model.train(), TOKENS), run(model, TOKENS, recompute=True)):
        assert torch.equal(other, out)


def test_padding_is_never_attended_to():
    """A short input gives the same output alone and padded."""
    torch.manual_seed(0)
    for model in (Generator(SHAPE), Generator(LATENT), Judge(SHAPE)):
        torch.nn.init.normal_(model.head.weight)
        alone = run(model, TOKENS[:, :7])
        padded = F.pad(TOKENS[:, :7], (0, 5), value=-1)
        found = run(model, padded, padded=True)[:, :7]
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


def runs_of(mask):
    """List the runs of blanks of each input, as slices."""
    texts = ["".join(".x"[blank] for blank in row) for row in mask.tolist()]
    return [[slice(*run.span()) for run in re.finditer("x+", text)] for text in texts]


def product_of(logits):
    """Make a policy whose blanks all have these logits (V,)."""
    return lambda batch: Product(logits.expand(*batch.mask.shape, -1), batch, Sampling())


@pytest.mark.parametrize("K", [1, 2])
def test_the_generators_loss_is_nats_of_a_hidden_character(world, K):
    """All blanks have the same probabilities. For each run of blanks we sum over the latent z."""
    train = Dataset(world / "text", "train", 16)
    args = Settings(block_size=16, batch_size=50)
    g = torch.Generator().manual_seed(0)
    prior = torch.rand(K, generator=g)
    q = torch.rand(K, 28, generator=g)
    prior, q = prior / prior.sum(), q / q.sum(dim=1, keepdim=True)  # π(z), q_z(v)
    seen = []

    def policy(batch):
        seen.append(batch)
        if K == 1:
            return product_of(q[0].log())(batch)
        logits = (x.log().expand(*batch.mask.shape, *x.shape) for x in (prior, q))
        return Latent(*logits, batch, Sampling())

    loss = generator_loss(policy, train, args, (1, 2))
    batch = masked_batch(train, args, args.masking, (1, 2), reveal=True)
    assert torch.equal(seen[0].masked, batch.masked)
    nats = 0
    for text, runs in zip(batch.tokens, runs_of(batch.mask)):
        for run in runs:
            nats -= (prior * q[:, text[run]].prod(dim=1)).sum().log()
    torch.testing.assert_close(loss, nats / batch.mask.sum())


Z = 26  # the tiny text has no z, so blanks that hold z were drawn
MOSTLY_Z = product_of(F.one_hot(torch.tensor(Z), 28).float())


def judged(world, judge, seed=(1,)):
    """Compute the judge's loss: -> the loss, what the judge read (B,T), and the batch."""
    train = Dataset(world / "text", "train", 16)
    args = Settings(block_size=16, batch_size=200, judge_masking="word,random")
    read = []
    loss = judge_loss(lambda x: read.append(x) or judge(x), MOSTLY_Z, train, args, 0.01, seed)
    return loss, read[0], masked_batch(train, args, args.judge_masking, seed)


@pytest.mark.parametrize("reveal", [False, True])
def test_inputs_of_every_difficulty(world, reveal):
    """With `reveal`, about four inputs in ten get a random part of their hidden text back.

    Without it, only whole words are hidden. The generator learns with it, the judge without it.
    """
    train = Dataset(world / "text", "train", 64)
    batch = masked_batch(train, Settings(batch_size=2000), "word", (1, 2), reveal)
    words = (batch.tokens == 0).cumsum(dim=1)  # (B,T) token 0 is the space
    hidden = torch.zeros_like(words).scatter_add_(1, words, batch.mask.long())  # (B,words)
    letters = torch.zeros_like(words).scatter_add_(1, words, torch.ones_like(words))
    partly = ((0 < hidden) & (hidden < letters - 1)).any(dim=1)  # `letters` counts a space, too
    share = partly.float().mean()
    # With `reveal`, about four inputs in ten can get letters back. Some of them get back none, or
    # only whole words, so `share` is less than 0.4.
    assert 0.25 < share < 0.4 if reveal else share == 0
    assert set((hidden > 0).sum(dim=1).tolist()) == {*range(1 - reveal, 6)}


def some_judge(tokens):
    return torch.sin(3.0 * tokens) * 3


def test_the_judge_reads_runs_that_are_text_and_runs_that_are_drawn(world):
    """Each run of blanks holds either the text or a draw, with equal chance.

    Visible characters are always those of the text. The same seed gives the same inputs, and
    another seed gives other ones.
    """
    _, read, batch = judged(world, some_judge)
    assert torch.equal(read[~batch.mask], batch.tokens[~batch.mask])
    labels = []
    for row, text, runs in zip(read, batch.tokens, runs_of(batch.mask)):
        labels.append([torch.equal(row[run], text[run]) for run in runs])
        assert all(real or (row[run] == Z).all() for real, run in zip(labels[-1], runs))
    assert 0.4 < np.mean(sum(labels, [])) < 0.6
    assert any(len(set(each)) == 2 for each in labels)
    assert torch.equal(judged(world, some_judge)[1], read)
    assert not torch.equal(judged(world, some_judge, seed=(2,))[1], read)


def test_the_judges_loss_by_hand(world):
    """A run of blanks has one label and one logit, the mean of its blanks' logits.

    Each blank has the loss of its run. The losses are averaged over the blanks of an input, and
    then over the inputs.
    """
    loss, read, batch = judged(world, some_judge)
    of_inputs = []
    for row, runs in zip(read, runs_of(batch.mask)):
        losses = []
        for run in runs:
            logit = some_judge(row[run]).mean()
            chance = logit.sigmoid() if row[run][0] != Z else (-logit).sigmoid()
            losses += [-chance.log()] * len(row[run])
        of_inputs.append(sum(losses) / len(losses))
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
    """The best logit is log(p/q). p is a character's probability in the text, q the generator's.

    A text here is a pair of characters. p is 0.9 if they are alike, and 0.1 if they differ. q is
    always 0.5.
    """
    args = Settings(batch_size=20000)
    generator = product_of(torch.tensor([0.0, 0.0, -torch.inf]))

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
    assert auc(real, real) == 0.5  # a tie counts half


def test_the_slope_is_the_likeliest_and_its_error_counts_an_input_once():
    g = torch.Generator().manual_seed(0)
    real = 0.5 + torch.randn(60, generator=g)
    drawn = -0.5 + torch.randn(60, generator=g)
    inputs = torch.arange(60) // 3
    slope, error = calibration(real, drawn, inputs)

    def loss(slope):
        return -F.logsigmoid(slope * real).sum() - F.logsigmoid(-slope * drawn).sum()

    assert slope == pytest.approx(min(np.arange(0.5, 2, 1e-3), key=loss), abs=1e-3)
    pulls, curvature = np.zeros(20), 0.0
    for scores, label in ((real, 1), (drawn, 0)):
        for x, i in zip(scores.tolist(), inputs.tolist()):
            p = 1 / (1 + math.exp(-slope * x))
            pulls[i] += (label - p) * x
            curvature += p * (1 - p) * x * x
    assert error == pytest.approx(np.sqrt((pulls**2).sum()) / curvature, rel=1e-5)


def test_the_report_of_models_that_know_nothing_and_of_a_judge_that_knows_the_text(world, capsys):
    val = Dataset(world / "text", "val", 16)
    text = val.decode(val.tokens)
    generator = product_of(F.pad(torch.zeros(27), (0, 1), value=float("-inf")))

    def judge(rows):
        known = [[1.0 if val.decode(row) in text else -0.5] * 16 for row in rows]
        return torch.tensor(known)  # (B,T)

    report(generator, judge, val, Settings(block_size=16))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for line in lines:
        figures = line.split(": ")[1].replace("±", "error").split()
        figures = dict(zip(figures[::2], map(float, figures[1::2])))
        assert figures["nats"] == pytest.approx(np.log(27), abs=1e-3)
        assert figures["auc"] > 0.98
        # A slope above 1 means that the judge's scores are too close to 0.
        assert figures["slope"] > 2 and figures["error"] > 0


def small(world, *more):
    sizes = ["--block_size=16", "--n_layer=1", "--n_embd=32", "--batch_size=16", "--device=cpu"]
    return [f"--dataset={world / 'text'}", *sizes, *more]


def test_pretraining_learns_resumes_and_reports(world, tmp_path, capsys, monkeypatch):
    """Pretraining starts from random weights, beats chance and writes two files.

    Ctrl-C stops it once while it trains the generator, and once while it trains the judge. If it is
    resumed each time, it writes the same weights as without a stop.
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
    """The judge reads the generator's draws, and the first ones have a high temperature.

    With `goes_on` the judge comes from a file. It then also reads a policy's draws, and all draws
    are at temperature 1. The inputs of the judge have other seeds than those of the generator.
    """
    calls = {"generator_loss": [], "judge_loss": []}

    def noted(loss_of, *given):
        calls[loss_of.__name__].append(given)
        return loss_of(*given)

    monkeypatch.setattr(pretrain, "report", lambda *_: None)
    for loss_of in (generator_loss, judge_loss):
        monkeypatch.setattr(pretrain, loss_of.__name__, partial(noted, loss_of))
    models = [f"--start={world}/generator.pt", "--n_latent=3", "--generator_steps=4"]
    models += [f"--start_judge={world}/judge.pt", f"--policy={world}/latent.pt"] * goes_on
    pretrain.main(small(world, *models, "--judge_steps=4", f"--out_dir={tmp_path}"))
    assert read(tmp_path / "generator.pt")["architecture"]["n_latent"] == 3
    _, sources, _, _, temperatures, seeds = zip(*calls["judge_loss"])
    assert sources[0] is sources[2] and sources[1] is sources[3]
    assert (sources[0] is not sources[1]) == goes_on
    assert temperatures == ((1,) * 4 if goes_on else (2, 1.5, 1, 1))
    of_generator = {given[-1] for given in calls["generator_loss"]}
    assert len({*seeds}) == len(of_generator) == 4 and not of_generator & {*seeds}


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
        ("--judge_masking=words", "masking='words' has a part 'words' that is not allowed"),
        ("--n_embd=100", "n_embd=100 is not allowed; it takes a multiple of 32"),
        ("--generator_steps=-1", "generator_steps takes a whole number from 0"),
        ("--n_latent=0", "n_latent takes a whole number from 1"),
        ("--dtype=float16", "dtype takes float32 or bfloat16"),
        ("--out_dir=", "out_dir is empty"),
        ("--out_dir={world}/judge.pt", "judge.pt is in use by another run, or cannot be written"),
        ("--start={world}/judge.pt", "holds a judge, but a generator is needed"),
        ("--policy={world}/judge.pt", "holds a judge, but a generator is needed"),
        ("--start={world}/no.pt", "start: there is no file"),
        (
            "--start={world}/generator.pt --block_size=17",
            "more than the 16 characters that the gen",
        ),
        ("--dataset={world}/none", "prepare.py --input=FILE --out_dir="),
    ],
)
def test_a_mistake_in_a_flag(flags, message, world, tmp_path, capsys):
    flags = flags.format(world=world).split()
    with pytest.raises(SystemExit, match="2"):
        pretrain.main([*small(world), f"--out_dir={tmp_path / 'out'}", *flags])
    error = capsys.readouterr().err
    assert error.startswith("pretrain: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_models_that_are_there_are_not_replaced(resume, world, tmp_path, capsys):
    """--resume only goes on with a stopped training. It does not replace a finished model."""
    (tmp_path / "judge.pt").write_bytes(b"somebody's")
    with pytest.raises(SystemExit, match="2"):
        pretrain.main(small(world, f"--out_dir={tmp_path}", *resume))
    assert "judge.pt exists and would be overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["judge.pt"]


def test_two_commands_do_not_share_a_folder(world, tmp_path, capsys):
    first = claim(tmp_path, 1, "lock")
    with pytest.raises(SystemExit, match="2"):
        pretrain.main(small(world, f"--out_dir={tmp_path}"))
    assert "is in use by another run" in capsys.readouterr().err
    first.close()


@pytest.mark.parametrize("name", sorted(path.name for path in Path("config").glob("*.py")))
def test_the_models_of_every_experiment_ship(name):
    config = load_config(["config/grpo_config.py", f"config/{name}"])
    for kind in ("generator", "judge"):
        path = Path(getattr(config, f"{kind}_checkpoint"))
        assert path.stat().st_size <= 4e6
        load_model(path, kind, " abcdefghijklmnopqrstuvwxyz_")
