import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.dataset import Dataset
from grpo.plumbing.checkpoint import build, load_model, model_file, read, write
from grpo.plumbing.config import load_config
from model import pretrain
from model.losses import (
    DOUBT,
    by_word,
    mixture_loss,
    run_log_likelihoods,
    swap_words,
    words_by_length,
    wrong_fills,
)
from model.pretrain import begin_from
from model.report import auc, mean_score, prefers_original, report
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


def test_each_value_of_the_latent_has_its_row():
    """Row b·K + z is what a generator with the z-th part of the head gives for input b."""
    torch.manual_seed(0)
    model = Generator(replace(SHAPE, n_latent=3))
    rows = model(TOKENS).view(3, 3, 12, 9)  # (B,K,T,V)
    for z, head in enumerate(model.head.weight.split(8)):
        one = Generator(SHAPE)
        one.trunk.load_state_dict(model.trunk.state_dict())
        one.head.weight = torch.nn.Parameter(head)
        torch.testing.assert_close(rows[:, z], one(TOKENS))


def test_a_file_that_is_older_than_the_latent_has_one_value():
    content = model_file(Generator(SHAPE), "abcdefgh_")
    del content["architecture"]["n_latent"]
    model = build(content, "generator", "abcdefgh_", "old.pt")
    assert model.n_latent == 1
    assert torch.equal(model.head.weight, content["weights"]["head.weight"])


def blanks(*rows):
    return torch.tensor([[c == "_" for c in row] for row in rows])


def test_the_mixture_likelihood_of_runs():
    """Against a loop over runs, values and characters."""
    K, V = 3, 9
    torch.manual_seed(0)
    mask = blanks("__.___.....", "_.........._"[:11], "...__.....__"[:11])
    tokens = torch.randint(8, mask.shape)
    logits = torch.randn(3 * K, 11, V).index_fill(-1, torch.tensor(8), float("-inf"))
    q = logits.softmax(dim=-1)
    runs = [(0, 0, 2), (0, 3, 6), (1, 0, 1), (2, 3, 5), (2, 10, 11)]
    total = 0.0
    for row, start, end in runs:
        of_z = [1.0] * K
        for z in range(K):
            for t in range(start, end):
                of_z[z] *= q[row * K + z, t, tokens[row, t]].item()
        total -= np.log(sum(of_z) / K)
    log_q = run_log_likelihoods(logits, tokens, mask)
    assert log_q.shape == (5, K)
    assert mixture_loss(log_q, mask).item() == pytest.approx(total / mask.sum().item(), rel=1e-5)


def test_without_a_latent_the_loss_is_the_cross_entropy():
    torch.manual_seed(0)
    mask = torch.rand(3, 12) < 0.5
    logits = Generator(SHAPE)(TOKENS)
    loss = mixture_loss(run_log_likelihoods(logits, TOKENS, mask), mask)
    torch.testing.assert_close(loss, F.cross_entropy(logits[mask], TOKENS[mask]))


def test_labels_are_per_word():
    text = "the cat sat on"
    fill = "the cut sat in"
    is_space = torch.tensor([[c == " " for c in text]])
    changed = torch.tensor([[a != b for a, b in zip(text, fill)]])
    wrong = by_word(changed, is_space)[0]
    # A space belongs to the word after it.
    assert "".join("x" if w else "." for w in wrong.tolist()) == "...xxxx....xxx"


def test_wrong_fills_touch_blanks_only_and_keep_some_originals(world):
    train = Dataset(world / "text", "train")
    torch.manual_seed(0)
    generator = Generator(TransformerConfig(len(train.vocabulary), 16, 1, 1, 32))
    tokens, mask = train.batch(400, 16, {"random": 1.0}, 0.4, 1, (0,))
    fills = wrong_fills(generator, train, tokens, mask, (1,))
    assert (fills[~mask] == tokens[~mask]).all() and (fills < train.mask_id).all()
    assert 0.08 < (fills == tokens).all(dim=1).float().mean() < 0.25


def test_wrong_fills_come_from_one_value_of_the_latent(world):
    """A generator whose z-th value knows one letter only: no fill mixes two of them."""
    train = Dataset(world / "text", "train")
    tokens, mask = train.batch(400, 16, {"random": 1.0}, 0.4, 1, (0,))
    known = torch.full((2, len(train.vocabulary)), -50.0)  # (K,V)
    known[0, 25] = 50.0  # y
    known[1, 26] = 50.0  # z

    def generator(masked):
        return known.repeat(len(masked), 1)[:, None].expand(-1, 16, -1)  # (B·K,T,V)

    fills = wrong_fills(generator, train, tokens, mask, (1,))
    letters = [set(row[blank].tolist()) for row, blank in zip(fills, mask)]
    assert 80 < letters.count({25}) and 80 < letters.count({26})
    assert letters.count({25, 26}) < 4


def test_swapped_words_are_words_of_the_text_in_the_wrong_place(world):
    train = Dataset(world / "text", "train")
    words = words_by_length(train)
    tokens, _ = train.batch(400, 16, {"word": 1.0}, 0, 1, (0,))
    lexicon = set(train.decode(train.tokens).split(" "))
    for length, (rows, shares) in words.items():
        assert {len(train.decode(word)) for word in rows} == {length}
        assert {train.decode(word) for word in rows} <= lexicon
        assert shares.sum() == pytest.approx(1)
        assert len(shares) == len(np.unique(rows, axis=0))
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


def test_auc_over_all_pairs_and_over_those_of_one_input():
    """The second input scores low whatever is filled in.

    Against its own original its fill loses, against the first one's nothing is learned from it.
    """
    real = torch.tensor([3.0, 1.0])
    fake = torch.tensor([2.0, 0.0])
    assert auc(real[:, None], fake) == 0.75
    assert auc(real, fake) == 1.0
    assert auc(real, real) == 0.5  # a fill that equals the original: a tie


def test_a_lenient_judge_sees_what_is_surely_wrong():
    doubted = torch.tensor([[-1.0, -1.0]])
    half_wrong = torch.tensor([[9.0, -9.0]])
    found = []
    for lenience in (0.0, 6.0):
        where = torch.ones(1, 2)
        real = mean_score(doubted, where, lenience)
        found.append(auc(real, mean_score(half_wrong, where, lenience)))
    assert found == [0, 1]


def test_preferring_the_original_is_counted_per_input():
    """A judge that likes small numbers: 1 2 > 5 6 is true, 3 < 2 is false, no change is no case."""
    tokens = torch.tensor([[1, 2, 0, 3], [1, 2, 0, 3], [4, 4, 0, 4]])
    others = torch.tensor([[5, 6, 0, 3], [1, 2, 0, 2], [4, 4, 0, 4]])
    assert prefers_original(-tokens.float(), -others.float(), others != tokens) == 0.5


def test_the_report_judges_each_text_once(world, capsys):
    """Two passes for each of seven tests, one batch each; K = 2 shows what each value explains."""
    val = Dataset(world / "text", "val")
    torch.manual_seed(0)
    shape = TransformerConfig(len(val.vocabulary), 16, 1, 1, 32, n_latent=2)
    judge = Judge(replace(shape, n_latent=1))
    passes = []
    judge.register_forward_pre_hook(lambda *_: passes.append(1))
    words = words_by_length(Dataset(world / "text", "train"))
    report(Generator(shape), judge, val, words, 16, size=64)
    assert len(passes) == 14
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 7
    for line in shown[:6]:
        figures = line[26:].split()
        figures = dict(zip(figures[::2], map(float, figures[1::2])))
        assert figures["least_z"] + figures["largest_z"] == pytest.approx(1, abs=2e-3)
        assert figures["nats"] == pytest.approx(np.log(27), abs=0.2)  # it has learned nothing


def test_a_generator_becomes_a_coin(tmp_path):
    """Copies of its head, with a little noise: the mixture is what it was, its values differ."""
    torch.manual_seed(0)
    one = Generator(SHAPE)
    write(tmp_path / "g.pt", model_file(one, "abcdefgh_"))
    same = Generator(SHAPE)
    begin_from(tmp_path / "g.pt", same, "abcdefgh_")
    assert torch.equal(same(TOKENS), one(TOKENS))
    coin = Generator(replace(SHAPE, n_latent=4))
    begin_from(tmp_path / "g.pt", coin, "abcdefgh_")
    rows = coin(TOKENS)[..., :8].view(3, 4, 12, 8)  # (B,K,T,V-1)
    torch.testing.assert_close(rows.mean(dim=1), one(TOKENS)[..., :8], rtol=0.2, atol=0.02)
    assert rows.std(dim=1).min() > 0
    for wrong in (replace(SHAPE, n_layer=3), replace(SHAPE, block_size=10)):
        with pytest.raises(ValueError, match="g.pt holds .* cannot become .*; repeat its flags"):
            begin_from(tmp_path / "g.pt", Generator(wrong), "abcdefgh_")


def small(world, *more):
    sizes = ["--block_size=16", "--n_layer=1", "--n_embd=32", "--batch_size=16", "--device=cpu"]
    return [f"--dataset={world / 'text'}", *sizes, *more]


@pytest.mark.parametrize("K", (1, 2))
def test_pretraining_learns_resumes_and_reports(world, tmp_path, capsys, monkeypatch, K):
    """From random weights to two files.

    Stopped by Ctrl-C in the midst of each model and resumed, it writes the same weights.
    """
    monkeypatch.setattr(pretrain, "SAVE_INTERVAL", 20)
    steps = ["--generator_steps=100", "--judge_steps=40"]
    arguments = small(world, f"--n_latent={K}", *steps)
    pretrain.main([*arguments, f"--out_dir={tmp_path / 'a'}"])
    shown = capsys.readouterr().out
    assert "two words" in shown and "judge_auc_paired" in shown
    random_15 = shown.split("random 15%")[1]
    # 27 characters: chance is 0.04.
    assert float(random_15.split("characters")[1].split()[0]) > 0.15

    for name, step in (("generator_loss", 50), ("judge_loss", 30)):
        loss_of = getattr(pretrain, name)

        def interrupted(*arguments, loss_of=loss_of, step=step):
            if arguments[-1][-1] == step:
                os.kill(os.getpid(), signal.SIGINT)
            return loss_of(*arguments)

        monkeypatch.setattr(pretrain, name, interrupted)
        resume = ["--resume"] if name == "judge_loss" else []
        with pytest.raises(SystemExit, match="130"):
            pretrain.main([*arguments, f"--out_dir={tmp_path / 'b'}", *resume])
        monkeypatch.setattr(pretrain, name, loss_of)
        told = capsys.readouterr().err.splitlines()[-1]
        assert f"stopped after step {step + 1} of" in told
        assert told.endswith("the same command with --resume goes on")
    pretrain.main([*arguments, f"--out_dir={tmp_path / 'b'}", "--resume"])
    for name in ("generator.pt", "judge.pt"):
        a = read(tmp_path / "a" / name)
        b = read(tmp_path / "b" / name)
        assert a["architecture"]["n_latent"] == (K if name == "generator.pt" else 1)
        for key, weight in a["weights"].items():
            assert torch.equal(weight, b["weights"][key])


def test_a_smaller_judge_starts_as_the_first_layers_of_the_generator(
    world, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(pretrain, "fit", lambda *_: None)
    layers = ["--n_layer=3", "--judge_layers=2", f"--out_dir={tmp_path}"]
    pretrain.main(small(world, *layers))
    generator = read(tmp_path / "generator.pt")
    judge = read(tmp_path / "judge.pt")
    assert generator["architecture"]["n_layer"] == 3
    assert judge["architecture"]["n_layer"] == 2
    assert judge["weights"]["head.bias"] == -DOUBT
    trunk = [name for name in judge["weights"] if name.startswith("trunk.")]
    assert len({name.split(".")[2] for name in trunk if "blocks" in name}) == 2
    for name in trunk:
        assert torch.equal(judge["weights"][name], generator["weights"][name])


def test_padding_is_never_attended_to():
    """A short input gives the same, alone or padded to any length; and its gradient too."""
    torch.manual_seed(0)
    for model in (Generator(SHAPE), Judge(SHAPE)):
        torch.nn.init.normal_(model.head.weight)
        alone = model(TOKENS[:, :7])
        model.trunk.padded = True
        padded = torch.full((3, 12), -1)
        padded[:, :7] = TOKENS[:, :7]
        torch.testing.assert_close(model(padded)[:, :7], alone, rtol=1e-5, atol=1e-5)
        assert torch.equal(model(TOKENS).isnan().any(), torch.tensor(False))


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


@pytest.mark.parametrize("name", sorted(path.name for path in Path("config").glob("*.py")))
def test_the_models_of_every_experiment_ship(name):
    config = load_config(["config/grpo_config.py", f"config/{name}"])
    for kind in ("generator", "judge"):
        path = Path(getattr(config, f"{kind}_checkpoint"))
        assert path.stat().st_size <= 4e6
        load_model(path, kind, " abcdefghijklmnopqrstuvwxyz_")
