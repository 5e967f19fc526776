from pathlib import Path

import numpy as np
import pytest
import torch

from data.dataset import Dataset
from grpo.plumbing.checkpoint import load_model, read
from grpo.plumbing.config import load_config
from model import pretrain
from model.pretrain import auc, by_word, prefers_original, swap_words, words_by_length, wrong_fills
from model.transformer import Generator, Judge, TransformerConfig, rotary_table, rotate

SHAPE = TransformerConfig(vocab_size=9, block_size=12, n_layer=2, n_head=2, n_embd=32)
TOKENS = torch.randint(8, (3, 12), generator=torch.Generator().manual_seed(0))


def test_rotation_sees_distances_only():
    cos, sin = rotary_table(12, 16)
    q, k = torch.randn(16), torch.randn(16)
    rotated = lambda x, t: rotate(x.expand(12, 16), cos, sin)[t]
    torch.testing.assert_close(rotated(q, 2) @ rotated(k, 5), rotated(q, 7) @ rotated(k, 10))
    assert abs(rotated(q, 2) @ rotated(k, 5) - rotated(q, 2) @ rotated(k, 6)) > 1e-3


def test_every_position_sees_every_other():
    torch.manual_seed(0)
    for model in (Generator(SHAPE), Judge(SHAPE)):
        torch.nn.init.normal_(model.head.weight)
        x = model.trunk.embedding(TOKENS[:1]).detach().requires_grad_()
        model.trunk.embedding.forward = lambda tokens: x
        out = model(TOKENS[:1])[0]
        for t in (0, 11):
            grad = torch.autograd.grad(out[t].flatten()[:8].sum(), x, retain_graph=True)[0]
            assert (grad[0].abs().sum(dim=-1) > 0).all()


def test_a_blank_is_never_filled_with_a_blank():
    logits = Generator(SHAPE)(TOKENS)
    assert (
        logits.shape == (3, 12, 9)
        and (logits[..., 8] == float("-inf")).all()
        and logits[..., :8].isfinite().all()
    )


def test_training_mode_changes_nothing():
    model = Generator(SHAPE)
    assert torch.equal(
        model.train()(TOKENS), model.eval()(TOKENS)
    )  # no dropout: what is sampled is what is differentiated


def test_labels_are_per_word():
    text, fill = "the cat sat on", "the cut sat in"
    is_space = torch.tensor([[c == " " for c in text]])
    wrong = by_word(torch.tensor([[a != b for a, b in zip(text, fill)]]), is_space)
    assert (
        "".join("x" if w else "." for w in wrong[0].tolist()) == "...xxxx....xxx"
    )  # a space belongs to the word after it


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
    words, tokens = words_by_length(train), train.batch(400, 16, {"word": 1.0}, 0, 1, (0,))[0]
    lexicon = set(train.decode(train.tokens).split(" "))
    assert all(
        train.decode(word) in lexicon and len(word) == length
        for length, (rows, _) in words.items()
        for word in rows
    )
    assert all(
        shares.sum() == pytest.approx(1) and len(shares) == len(np.unique(rows, axis=0))
        for rows, shares in words.values()
    )
    swapped = swap_words(train, words, tokens, (1,), share=0.5)
    changed = 0
    for before, after in zip(map(train.decode, tokens), map(train.decode, swapped)):
        pairs = list(
            zip(before.split(" ")[1:-1], after.split(" ")[1:-1], strict=True)
        )  # the window may cut the first word and the last
        assert (
            before.split(" ")[0] == after.split(" ")[0]
            and [len(a) for a, _ in pairs] == [len(b) for _, b in pairs]
            and {b for _, b in pairs} <= lexicon | {""}
        )
        changed += any(a != b for a, b in pairs)
    assert changed > 100


def test_auc_over_all_pairs_and_over_those_of_one_input():
    """The second input scores low whatever is filled in: against its own original its fill loses, against the first one's nothing is learned from it."""
    judge, everywhere = lambda rows: rows.float(), torch.ones(2, 1)
    originals, fills = torch.tensor([[3], [1]]), torch.tensor([[2], [0]])
    assert (
        auc(judge, originals, fills, everywhere) == 0.75
        and auc(judge, originals, fills, everywhere, paired=True) == 1.0
    )
    assert (
        auc(judge, originals, originals, everywhere, paired=True) == 0.5
    )  # a fill that equals the original: a tie
    doubted, half_wrong = torch.tensor([[-1, -1]]), torch.tensor([[9, -9]])
    assert [auc(judge, doubted, half_wrong, torch.ones(1, 2), lenience=x) for x in (0.0, 6.0)] == [
        0,
        1,
    ]  # a lenient judge sees what is surely wrong


def test_preferring_the_original_is_counted_per_input():
    tokens = torch.tensor([[1, 2, 0, 3], [1, 2, 0, 3], [4, 4, 0, 4]])
    others = torch.tensor(
        [[5, 6, 0, 3], [1, 2, 0, 2], [4, 4, 0, 4]]
    )  # the last one is unchanged: it does not count
    assert (
        prefers_original(lambda rows: -rows.float(), tokens, others) == 0.5
    )  # a judge that likes small numbers: 1 2 > 5 6, 3 < 2 is false


def test_pretraining_learns_resumes_and_reports(world, tmp_path, capsys, monkeypatch):
    """From random weights to two files; stopped in the midst of the judge and resumed, it writes the same weights."""
    monkeypatch.setattr(pretrain, "SAVE_INTERVAL", 20)
    arguments = [
        f"--dataset={world / 'text'}",
        "--block_size=16",
        "--n_layer=1",
        "--n_embd=32",
        "--batch_size=16",
        "--generator_steps=100",
        "--judge_steps=40",
    ]
    pretrain.main([*arguments, f"--out_dir={tmp_path / 'a'}"])
    shown = capsys.readouterr().out
    assert "two words" in shown and "judge_auc_paired" in shown
    assert (
        float(shown.split("random 15%")[1].split("characters")[1].split()[0]) > 0.15
    )  # 27 characters: chance is 0.04

    judge_loss = pretrain.judge_loss

    def stop_at_30(judge, generator, dataset, words, size, block_size, seed):
        if seed[-1] == 30:
            raise KeyboardInterrupt
        return judge_loss(judge, generator, dataset, words, size, block_size, seed)

    monkeypatch.setattr(pretrain, "judge_loss", stop_at_30)
    with pytest.raises(SystemExit, match="130"):
        pretrain.main([*arguments, f"--out_dir={tmp_path / 'b'}"])
    monkeypatch.setattr(pretrain, "judge_loss", judge_loss)
    pretrain.main([*arguments, f"--out_dir={tmp_path / 'b'}", "--resume"])
    for name in ("generator.pt", "judge.pt"):
        a, b = (read(tmp_path / folder / name)["weights"] for folder in "ab")
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_smaller_judge_starts_as_the_first_layers_of_the_generator(
    world, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(pretrain, "fit", lambda *_: None)
    pretrain.main(
        [
            f"--dataset={world / 'text'}",
            "--block_size=16",
            "--n_layer=3",
            "--judge_layers=2",
            "--n_embd=32",
            f"--out_dir={tmp_path}",
        ]
    )
    generator, judge = (read(tmp_path / name) for name in ("generator.pt", "judge.pt"))
    assert (generator["architecture"]["n_layer"], judge["architecture"]["n_layer"]) == (3, 2)
    trunk = [name for name in judge["weights"] if name.startswith("trunk.")]
    assert len({name.split(".")[2] for name in trunk if "blocks" in name}) == 2
    assert all(torch.equal(judge["weights"][name], generator["weights"][name]) for name in trunk)


def test_padding_is_never_attended_to():
    """A short input gives the same, alone or padded to any length; and its gradient too."""
    torch.manual_seed(0)
    for model in (Generator(SHAPE), Judge(SHAPE)):
        torch.nn.init.normal_(model.head.weight)
        alone = model(TOKENS[:, :7])
        model.trunk.padded = True
        padded = torch.full((3, 12), -1)
        padded[:, :7] = TOKENS[:, :7]
        torch.testing.assert_close(model(padded)[:, :7], alone, rtol=1e-5, atol=1e-6)
        assert torch.equal(model(TOKENS).isnan().any(), torch.tensor(False))


def test_gradient_checkpointing_changes_no_gradient():
    torch.manual_seed(0)
    model, gradients, calls = Generator(SHAPE), [], []
    model.trunk.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for model.trunk.checkpointing in (False, True):
        model.zero_grad()
        model(TOKENS)[..., :8].square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    assert len(calls) == 3  # once, and twice: computed again


@pytest.mark.parametrize("name", sorted(path.name for path in Path("config").glob("*.py")))
def test_the_models_of_every_experiment_ship(name):
    config = load_config(["config/grpo_config.py", f"config/{name}"])
    for kind in ("generator", "judge"):
        path = Path(getattr(config, f"{kind}_checkpoint"))
        assert (
            path.stat().st_size <= 4e6
            and load_model(path, kind, " abcdefghijklmnopqrstuvwxyz_") is not None
        )
