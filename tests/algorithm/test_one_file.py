"""Check that grpo/one_file.py trains just as config/grpo_config.py does.

The two share the network and no other code, as test_imports.py checks. So each is an oracle for the
other.
"""

from itertools import islice
from pathlib import Path

import pytest
from conftest import command_line, figures
from torch.nn.utils import parameters_to_vector

import train_grpo
from data.dataset import read_dataset
from data.sums.prepare import prepare
from data.sums.rule import is_correct
from grpo import one_file
from grpo.batch import draw_batch
from grpo.run.checkpoint import load_model
from grpo.run.config import Config
from model.transformer import Generator, Judge

ROOT = Path(__file__).parents[2]
STEPS = 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    prepare(folder, 3)
    return folder


@pytest.mark.parametrize("changed", [{}, {"WARMUP": 1, "STEPS": 3, "BETA": 0.5}])
def test_its_losses_and_weights_are_those_of_train_grpo(changed, dataset, tmp_path, monkeypatch):
    """Compare three steps with the settings as they are, and three that use the KL and the cosine.

    To be fast, both sides take 8 inputs and 4 completions of each. The weights agree less closely
    than the losses do. AdamW divides the gradient of each weight by its own size. So where a
    gradient is 0 but for rounding, it makes a whole step of the rounding. We therefore compare all
    weights together. Their distance must be less than a thousandth of the way that they have come.
    """
    monkeypatch.chdir(ROOT)  # one_file finds the shipped model from here
    for name, value in {"B": 8, "G": 4, **changed}.items():
        monkeypatch.setattr(one_file, name, value)
    settings = {"dataset": dataset, "out_dir": tmp_path, "device": "cpu", "max_iters": STEPS}
    settings |= {"batch_size": 8, "group_size": 4, "eval_inputs": 1}
    settings["lr_decay_iters"] = one_file.STEPS
    if changed:
        settings |= {"warmup_iters": one_file.WARMUP, "kl_beta": one_file.BETA}
    train_grpo.main(["config/grpo_config.py", *command_line(settings)])
    expected = [step["loss"] for step in figures(tmp_path)]
    there = load_model(tmp_path, Generator)
    train = read_dataset(dataset / "train.txt", 11)

    generator, reference = (one_file.load(Generator, "model/pretrained/sums.pt") for _ in range(2))
    judge = one_file.load(Judge, "model/pretrained/sums_judge.pt")

    def draw_the_same(_, size, seed):
        config = Config(batch_size=size, group_size=4, seed=seed[0])
        batch = draw_batch(train, config, seed[1], "cpu")
        return batch.masked, batch.uniforms

    monkeypatch.setattr(one_file, "draw_batch", draw_the_same)
    losses = list(islice(one_file.train(generator, reference, judge, []), STEPS))

    assert losses == pytest.approx(expected, abs=1e-5)
    start, here, there = (
        parameters_to_vector(x.parameters()) for x in (reference, generator, there)
    )
    assert (here - there).norm() < 1e-3 * (here - start).norm()


def test_its_sums_and_its_rule_are_those_of_the_dataset(dataset):
    sums = [
        (dataset / f"{name}.txt").read_text(encoding="utf-8").split() for name in ("train", "val")
    ]
    assert one_file.make_sums() == sums
    wrong = ["417+472=888", "017+871=888", "a17+471=888", "4=7+471=888", "4+7+471=888"]
    for text in sums[1][:100] + wrong:
        assert one_file.is_correct(text) == is_correct(text)


def test_it_runs_to_the_end(monkeypatch, capsys):
    """Run the file with fewer inputs and steps, and read the sums that it prints at the end."""
    source = Path(one_file.__file__).read_text(encoding="utf-8")
    smaller = {
        "B, G, T = 128, 16,": "B, G, T = 2, 2,",
        "= 200, 5": "= 20, 1",
        "held_out, 256,": "held_out, 8,",
    }
    for old, new in smaller.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    monkeypatch.chdir(ROOT)
    exec(source, {"__name__": "__main__"})

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 * 3  # the inputs, and their completions before and after
