"""Teach the generator somebody else's answers with cross-entropy, to compare that with GRPO.

    python -m grpo.tools.supervised even out-even      # the most even correct answer
    python -m grpo.tools.supervised argmax out-found --teacher=out      # a GRPO run's
    python -m grpo.tools.supervised passes out-passes  # the base model's own, one blank a pass
    python -m grpo.tools.supervised best out-best      # the judge's best of the base's 16
    python -m grpo.tools.supervised best out-more --teacher=out-best/generator.pt

It writes generator.pt into that folder. The inputs are 100,000 drawn from the training split, as a
run would draw them.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from data.dataset import make_if_missing, read_splits
from data.sums.rule import correct_answers
from data.vocabulary import decode, encode
from grpo.batch import make_batch
from grpo.evaluation.rivals import best_by_word, fill_in_passes
from grpo.reward import log_odds
from grpo.run.checkpoint import LATEST, load_model, model_file, write
from grpo.run.config import Config
from grpo.run.network import make_judge, make_policy
from model.losses import PRETRAINING, generator_loss
from model.pretrain import fit
from model.transformer import Generator, Judge

SIZE, PART = 100_000, 1000  # all inputs, and those that are filled at once
CPU = torch.device("cpu")


def most_even(masked: str) -> str:
    """Return the correct answer whose summands differ least."""

    def difference(answer: str) -> int:
        first, second = answer.split("=")[0].split("+")
        return abs(int(first) - int(second))

    return min(correct_answers(masked), key=difference)


def answer(kind, batch, teacher, judge):
    """Fill the inputs of a batch: -> (B,T)."""
    if kind == "even":
        return torch.stack([encode(most_even(text)) for text in decode(batch.masked)])
    if kind == "argmax":
        return teacher(batch).best_guess()
    if kind == "passes":
        return fill_in_passes(teacher, batch, "left to right")[0][:, 0]
    q = teacher(batch)
    completions = q.sample().completions  # (B,16,T)
    return best_by_word(q, completions, log_odds(judge, completions, batch))[:, 0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=["even", "argmax", "passes", "best"])
    parser.add_argument("out_dir")
    parser.add_argument("--teacher", default=Config.generator_checkpoint)
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    config = Config()
    make_if_missing("sums")
    train, _ = read_splits("sums", config.block_size)
    tokens, mask, words = train.batch(SIZE, config.masking, (3, 0))  # (N,T)
    path = Path(args.teacher)
    path = path / LATEST if path.is_dir() else path
    teacher = make_policy(load_model(path, Generator), Config(batch_size=PART), CPU)
    judge = make_judge(load_model(config.judge_checkpoint, Judge), config, CPU)
    with torch.no_grad():
        answers = []
        for start in range(0, SIZE, PART):
            rows = slice(start, start + PART)
            batch = make_batch(tokens[rows], mask[rows], words[rows], 16, (3, 0, start))
            answers.append(answer(args.kind, batch, teacher, judge))
    answers = torch.cat(answers)  # (N,T)
    student = load_model(config.generator_checkpoint, Generator)
    policy = make_policy(student, config, CPU)

    def loss(step):
        seed = (PRETRAINING, args.seed, 0, step)
        rows = np.random.default_rng(seed).integers(SIZE, size=config.batch_size)  # (B,)
        rows = torch.from_numpy(rows)
        return generator_loss(policy, make_batch(answers[rows], mask[rows], words[rows], 1, seed))

    fit("student", student, loss, args.updates, 2e-3)
    write(Path(args.out_dir) / "generator.pt", model_file(student, torch.float16))


if __name__ == "__main__":
    main()
