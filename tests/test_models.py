import pytest
import torch

from data.dataset import Dataset
from grpo.checkpoint import read
from model.pretrain import Adversary, by_word, main as pretrain_main, wrong_fills
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
    assert logits.shape == (3, 12, 9) and (logits[..., 8] == float("-inf")).all() and logits[..., :8].isfinite().all()


def test_training_mode_changes_nothing():
    model = Generator(SHAPE)
    assert torch.equal(model.train()(TOKENS), model.eval()(TOKENS))  # no dropout: what is sampled is what is differentiated


def test_score_is_the_mean_probability():
    torch.manual_seed(0)
    judge = Judge(SHAPE)
    torch.nn.init.normal_(judge.head.weight)
    torch.testing.assert_close(judge.score(TOKENS), judge(TOKENS).sigmoid().mean(dim=1))
    assert ((judge.score(TOKENS) > 0) & (judge.score(TOKENS) < 1)).all()


def test_labels_are_per_word():
    text, fill = "the cat sat on", "the cut sat in"
    is_space = torch.tensor([[c == " " for c in text]])
    wrong = by_word(torch.tensor([[a != b for a, b in zip(text, fill)]]), is_space)
    assert "".join("x" if w else "." for w in wrong[0].tolist()) == "...xxxx....xxx"  # a space belongs to the word after it


def pretraining(world):
    train = Dataset(world / "text", "train")
    torch.manual_seed(0)
    shape = TransformerConfig(len(train.vocabulary), 16, 1, 1, 32)
    return train, Generator(shape), Judge(shape)


def test_wrong_fills_touch_blanks_only_and_keep_some_originals(world):
    train, generator, _ = pretraining(world)
    tokens, mask = train.batch(400, 16, {"random": 1.0}, 0.4, 1, (0,))
    fills = wrong_fills(generator, generator, train, tokens, mask, (1,))
    assert (fills[~mask] == tokens[~mask]).all() and (fills < train.mask_id).all()
    assert 0.08 < (fills == tokens).all(dim=1).float().mean() < 0.25


def test_the_adversary_moves_and_starts_anew(world):
    train, generator, judge = pretraining(world)
    torch.nn.init.normal_(judge.head.weight)
    adversary = Adversary(generator)
    distance = lambda: sum((a - b).abs().sum().item() for a, b in zip(adversary.generator.parameters(), generator.parameters()))  # noqa: E731
    adversary.step(judge, train, 16, (0, 2))
    moved = distance()
    adversary.step(judge, train, 16, (0, 4))
    assert 0 < moved < distance()
    adversary.step(judge, train, 16, (0, Adversary.PATIENCE))
    assert 0 < distance() <= moved * 1.5


def test_pretraining_learns_resumes_and_reports(world, tmp_path, capsys):
    """From random weights to two files; stopped and resumed it writes the same weights."""
    arguments = [f"--dataset={world / 'text'}", "--block_size=16", "--n_layer=1", "--judge_layers=1", "--n_embd=32", "--batch_size=16", "--generator_steps=100", "--judge_steps=40"]
    pretrain_main([*arguments, f"--out_dir={tmp_path / 'a'}"])
    shown = capsys.readouterr().out
    assert "two words" in shown and "judge_auc" in shown
    accuracy = float(shown.split("random 15%")[1].split("characters")[1].split()[0])
    assert accuracy > 0.15  # 27 characters: chance is 0.04
    (tmp_path / "a" / "judge_state.pt").unlink()  # as if stopped after the generator
    judge = (tmp_path / "a" / "judge.pt").read_bytes()
    pretrain_main([*arguments, f"--out_dir={tmp_path / 'a'}", "--resume"])
    assert same_weights(tmp_path / "a" / "judge.pt", judge, tmp_path)
    with pytest.raises(SystemExit) as stop:
        pretrain_main([*arguments, f"--out_dir={tmp_path / 'a'}", "--resume", "--seed=2"])
    assert stop.value.code == 2 and "repeat its arguments" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        pretrain_main(["--judge_layers=9"])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def same_weights(path, content, folder):
    (folder / "other.pt").write_bytes(content)
    a, b = (read(p)["weights"] for p in (path, folder / "other.pt"))
    return all(torch.equal(a[name], b[name]) for name in a)
