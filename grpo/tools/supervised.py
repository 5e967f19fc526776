"""Teach the generator answers with cross-entropy instead, to compare that with GRPO.

    python -m grpo.tools.supervised even out-even               # the most even correct answer
    python -m grpo.tools.supervised argmax out-found --teacher=out           # a GRPO run's answer
    python -m grpo.tools.supervised best out-best --inputs=25600 --updates=400

The last one takes as many judge calls as the main run of GRPO. So do four rounds of expert
iteration. Each is `best ... --inputs=6400 --updates=100`, and has the last one's generator.pt as
--teacher and --start. To measure a generator, make a run that doesn't change it:

    python train_grpo.py config/rule.py --max_iters=1 --learning_rate=0 \\
        --generator_checkpoint=out-even/generator.pt --out_dir=out-even-measured

It writes generator.pt into that folder, and its inputs as prompts.json, so that GRPO can train on
the same ones. They're drawn from the training split as a run would draw them.

    any       the sum that was there, which is what pretraining learned from
    even      the correct answer whose summands differ least
    smallest  the one with the smallest first summand
    argmax    the teacher's most likely answer
    best      the judge's choice from 16 that the teacher draws
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.sums.rule import correct_answers
from data.user_mistake import Mistake, exit_on_mistake
from data.vocabulary import MASK_ID, decode, encode
from grpo.batch import Batch, make_batch
from grpo.evaluation.rivals import best_by_word
from grpo.reward import log_odds
from grpo.run.checkpoint import load_model, model_file, write
from grpo.run.config import Config, Parser
from grpo.run.load import check_length, load_splits
from grpo.run.network import make_judge, make_policy
from model.losses import PRETRAINING, generator_loss
from model.pretrain import fit
from model.transformer import Generator, Judge

PART = 1000  # inputs that are answered at once
CPU = torch.device("cpu")


def at_least_one(text: str) -> int:
    """Read a whole number above 0."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def difference(answer: str) -> int:
    """Return by how much the two summands differ."""
    first, second = answer.split("=")[0].split("+")
    return abs(int(first) - int(second))


def best_answers(batch: Batch, key) -> Tensor:  # (B,T)
    """Choose for each input the correct answer with the smallest `key`."""
    answers = (min(correct_answers(masked), key=key) for masked in decode(batch.masked))
    return torch.stack([encode(answer) for answer in answers])


def best_draws(teacher, judge, batch: Batch) -> Tensor:  # (B,T)
    """Let the judge choose from 16 that the teacher draws."""
    q = teacher(batch)
    completions = q.sample().completions  # (B,16,T)
    return best_by_word(q, completions, log_odds(judge, completions, batch))[:, 0]


ANSWERS = {  # each takes a batch, the teacher and the judge, and returns (B,T)
    "any": lambda batch, teacher, judge: batch.tokens,
    "even": lambda batch, teacher, judge: best_answers(batch, difference),
    "smallest": lambda batch, teacher, judge: best_answers(batch, str),
    "argmax": lambda batch, teacher, judge: teacher(batch).best_guess(),
    "best": lambda batch, teacher, judge: best_draws(teacher, judge, batch),
}


def teach(args) -> None:
    """Let the generator learn the answers, and write it."""
    if not args.out_dir or Path(args.out_dir).exists():
        raise Mistake(f"out_dir={args.out_dir} exists; name another folder")
    torch.set_num_threads(1)
    config = Config()
    for path in args.start, args.teacher:  # are they made for these sums, and know their digits?
        check_length(config.block_size, load_model(path, Generator))
        train, _ = load_splits(replace(config, generator_checkpoint=path))
    Path(args.out_dir).mkdir(parents=True)  # if we can't write here, fail now
    tokens, mask, words = train.batch(args.inputs, config.masking, (args.seed, 0))  # each (N,T)
    teacher = make_policy(load_model(args.teacher, Generator), Config(batch_size=PART), CPU)
    judge = make_judge(load_model(config.judge_checkpoint, Judge), config, CPU)
    answers = []
    with torch.no_grad():
        for start in range(0, args.inputs, PART):
            rows = slice(start, start + PART)
            batch = make_batch(tokens[rows], mask[rows], words[rows], 16, (args.seed, 0, start))
            answers.append(ANSWERS[args.answers](batch, teacher, judge))
    answers = torch.cat(answers)  # (N,T)
    student = load_model(args.start, Generator)
    policy = make_policy(student, config, CPU)

    def loss(step):
        seed = (PRETRAINING, args.seed, 0, step)
        rows = np.random.default_rng(seed).integers(args.inputs, size=config.batch_size)  # (B,)
        rows = torch.from_numpy(rows)
        return generator_loss(policy, make_batch(answers[rows], mask[rows], words[rows], 1, seed))

    fit("student", student, loss, args.updates, 2e-3)
    write(Path(args.out_dir) / "generator.pt", model_file(student, torch.float16))
    prompts = decode(tokens.masked_fill(mask, MASK_ID))
    write(Path(args.out_dir) / "prompts.json", json.dumps({"prompts": prompts}).encode())


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m grpo.tools.supervised")
    add = parser.add_argument
    add("answers", choices=ANSWERS)
    add("out_dir")
    add(
        "--teacher",
        default=Config.generator_checkpoint,
        help="a generator's file or a run's folder",
    )
    add("--start", default=Config.generator_checkpoint, help="the generator that learns")
    add("--inputs", type=at_least_one, default=100_000, help="how many sums it learns from")
    add("--updates", type=at_least_one, default=1200)
    add("--seed", type=at_least_one, default=1)
    with exit_on_mistake("supervised"):
        teach(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
