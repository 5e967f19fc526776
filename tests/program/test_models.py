import os
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
from model.losses import (
    DOUBT,
    by_word,
    generator_loss,
    swap_words,
    weigh,
    words_by_length,
    wrong_fills,
)
from model.report import auc, mean_scores, report
from model.transformer import Generator, Judge, TransformerConfig, rotary_table, rotate

SHAPE = TransformerConfig(vocab_size=9, block_size=12, n_layer=2, n_head=2, n_embd=32)
TOKENS = torch.randint(8, (3, 12), generator=torch.Generator().manual_seed(0))


def test_rotation_sees_distances_only():
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


def test_gradient_checkpointing_changes_no_gradient():
    torch.manual_seed(0)
    model = Generator(SHAPE)
    gradients = []
    calls = []
    model.trunk.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for checkpointing in (False, True):
        model.trunk.checkpointing = checkpointing
        model.zero_grad()
        model(TOKENS)[..., :8].square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients):
        assert torch.equal(a, b)
    assert len(calls) == 3  # once, and twice: computed again


def test_the_generators_loss_is_nats_of_a_hidden_character(world):
    """One that always gives the letter e the probability 1/2, the other 26 characters the rest."""
    train = Dataset(world / "text", "train")
    q = torch.full((28,), 0.5 / 26)
    q[5] = 0.5
    q[27] = 0
    args = pretrain.parse(["--block_size=16", "--batch_size=200", "--masking=random"])
    seen = []

    def generator(masked):
        seen.append(masked)
        return q.log().expand(*masked.shape, 28)  # (B,T,V)

    loss = generator_loss(generator, train, args, (1, 2))
    text, _ = train.batch(200, 16, {"random": 1.0}, 0, 1, (1, 2, 0))
    hidden = text[seen[0] == train.mask_id]
    assert 0.1 < len(hidden) / text.numel() < 0.4
    want = -sum(np.log(q[c].item()) for c in hidden.tolist()) / len(hidden)
    assert loss.item() == pytest.approx(want, rel=1e-5)


def test_labels_are_per_word():
    text = "the cat sat on"
    fill = "the cut sat in"
    is_space = torch.tensor([[c == " " for c in text]])
    changed = torch.tensor([[a != b for a, b in zip(text, fill)]])
    wrong = by_word(changed, is_space)[0]
    # A space belongs to the word after it.
    assert "".join("x" if w else "." for w in wrong.tolist()) == "...xxxx....xxx"


def test_weighing_two_kinds_of_losses():
    losses = torch.tensor([[1.0, 2.0], [3.0, 30.0]])
    flags = torch.tensor([[True, True], [True, False]])
    assert weigh(losses, flags, 0.75) == 0.75 * 2 + 0.25 * 30
    assert weigh(losses, flags | True, 0.75) == 0.75 * 9  # nowhere: 0, not NaN


def test_wrong_fills_touch_blanks_only_and_keep_some_originals(world):
    train = Dataset(world / "text", "train")
    torch.manual_seed(0)
    generator = Generator(TransformerConfig(len(train.vocabulary), 16, 1, 1, 32))
    tokens, mask = train.batch(400, 16, {"random": 1.0}, 0.4, 1, (0,))
    fills = wrong_fills(generator, train, tokens, mask, (1,))
    assert (fills[~mask] == tokens[~mask]).all() and (fills < train.mask_id).all()
    assert 0.08 < (fills == tokens).all(dim=1).float().mean() < 0.25


def test_swapped_words_are_words_of_the_text_in_the_wrong_place(world):
    train = Dataset(world / "text", "train")
    words = words_by_length(train)
    tokens, _ = train.batch(400, 16, {"word": 1.0}, 0, 1, (0,))
    lexicon = set(train.decode(train.tokens).split(" "))
    for length, (rows, shares) in words.items():
        found = [train.decode(word) for word in rows]
        assert set(found) == {word for word in lexicon if len(word) == length}
        assert len(found) == len(set(found)) == len(shares)
        assert shares.sum() == pytest.approx(1)
    swapped = swap_words(train, words, tokens, (1,), share=0.5)
    changed = 0
    for before, after in zip(map(train.decode, tokens), map(train.decode, swapped)):
        before = before.split(" ")
        after = after.split(" ")
        # The window may cut the first word and the last: they stay.
        assert (before[0], before[-1]) == (after[0], after[-1])
        assert [len(word) for word in before] == [len(word) for word in after]
        assert set(after[1:-1]) <= lexicon | {""}
        changed += before != after
    assert changed > 100


def test_auc_is_over_all_pairs():
    real = torch.tensor([3.0, 1.0])
    fake = torch.tensor([2.0, 0.0])
    assert auc(real, fake) == 0.75
    assert auc(real, real) == 0.5  # a tie is half a pair


def test_scores_are_means_over_a_part_of_the_input():
    tokens = torch.tensor([[1, 2, 0, 3], [4, 4, 0, 4]])
    others = torch.tensor([[5, 6, 0, 3], [4, 4, 0, 1]])
    changed = tokens != others

    def judge(rows):  # likes small numbers
        return -rows.float()

    real, other = mean_scores(judge, tokens, others, changed)
    p = [1 / (1 + np.exp(n)) for n in range(7)]
    torch.testing.assert_close(real, torch.tensor([(p[1] + p[2]) / 2, p[4]], dtype=torch.float32))
    torch.testing.assert_close(other, torch.tensor([(p[5] + p[6]) / 2, p[1]], dtype=torch.float32))


def test_the_report_of_models_that_know_nothing_and_of_a_judge_that_knows_the_text(world, capsys):
    val = Dataset(world / "text", "val")
    words = words_by_length(Dataset(world / "text", "train"))
    text = val.decode(val.tokens)

    def generator(masked):
        return F.pad(torch.zeros(*masked.shape, 27), (0, 1), value=float("-inf"))  # (B,T,V)

    def judge(rows):
        known = [[1.0 if val.decode(row) in text else -1.0] * 16 for row in rows]
        return torch.tensor(known)  # (B,T)

    report(generator, judge, val, words, 16, size=64)
    *by_masking, last = capsys.readouterr().out.splitlines()
    for line in by_masking:
        figures = line.split(": ")[1].split()
        figures = dict(zip(figures[::2], map(float, figures[1::2])))
        assert figures["nats"] == pytest.approx(np.log(27), abs=1e-3)
        assert figures["auc"] > 0.98
    assert float(last.split("prefers the original")[1]) > 0.8  # some stand in the text, too


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
    assert judge["weights"].pop("head.bias") == -DOUBT
    common = [key for key in judge["weights"] if key.startswith("trunk.") and key in start]
    assert len({key.split(".")[2] for key in common if "blocks" in key}) == min(layers, 2)
    assert all(torch.equal(judge["weights"][key], start[key]) for key in common)


@pytest.mark.parametrize(
    "flags, message",
    [
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
