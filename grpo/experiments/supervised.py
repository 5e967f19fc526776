"""Teach the generator answers without advantages, to compare that with GRPO.

    python -m grpo.experiments.supervised any out-q --power=1                # one answer, -q(y)
    python -m grpo.experiments.supervised smallest out-smallest              # cross-entropy
    python -m grpo.experiments.supervised accepted out-40 --inputs=25600 --updates=400 --rounds=40
    python -m grpo.experiments.supervised any out-q-text config/text.py --power=1    # other data
    python -m grpo.evaluation out-q/generator.pt config/rule.py              # measure what came out

Data and networks are those of the config, by default the sums. Which answers are there for an
input? (`smallest`, `all`, `search` and `scan` are for sums.)

    any       what was there, which is what pretraining learned from
    smallest  the one with the smallest first summand
    all       every correct answer
    slow      what the base model writes one blank a pass, left to right or in --order (1606.07947):
              its likeliest character or, with --share=0.4, the first in the alphabet that's at
              least .4 times as probable, which makes a convention of it
    search    the first one that earns more than 0, by default from the judge: first numbers are
              tried in ascending order, and the base model fills in the second one in a pass
    scan      likewise, but all are tried, and it's the one that earns most (the first of these)
    accepted  of 16 that the student draws, those with a reward above 0, by default the judge's
              (ReST-EM, 2312.06585)
    above     of 16 that the student draws, those with a reward above their mean

With --reward, other answers have to earn more than 0, too.

With p the probability that one of them comes out, the loss is (1 − p^λ) / λ. λ is --power. At 0
that's −log p, cross-entropy. At 1 it's 1 − p, the expected reward of a rule that pays for these
answers (generalized cross-entropy, 1805.07836; minimum risk training, 1512.02433). An answer that
was drawn twice counts twice.

In each of --rounds the student meets new inputs and answers them anew: one round is offline, four
are expert iteration, and as many as there are updates is online. Everything goes into the folder:
generator.pt, and the last round's inputs as prompts.json, so that GRPO can train on the same ones.

Shapes: N inputs of a round, B of an update, n answers to each, T characters.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.files import check_new
from data.sums.rule import correct_answers
from data.user_mistake import Mistake, run_program
from data.vocabulary import MASK_ID, VOCABULARY, decode, encode
from grpo.advantage import all_equal
from grpo.batch import Batch, make_batch
from grpo.optimizer import make_adamw
from grpo.policy import Policy
from grpo.reward import Rewards
from grpo.run.arguments import TINY, read_arguments, within
from grpo.run.checkpoint import check_fit, load_model, model_file, write
from grpo.run.config import Config, load_config
from grpo.run.load import (
    SAMPLES,
    Models,
    load_models,
    load_rewards,
    load_splits,
    make_policy,
)
from model.losses import PRETRAINING
from model.pretrain import fit, make_optimizers
from model.transformer import Generator

PART = 1000  # inputs that are answered at once
CPU = torch.device("cpu")
NOTHING = -1e9  # log q of an answer that isn't there
FIRST = 3  # digits of the first number
ZERO = VOCABULARY.index("0")


def correct(batch: Batch, only_smallest: bool = False) -> tuple[Tensor, Tensor]:
    """List the correct answers of each input, or only the one with the smallest first summand."""
    T = batch.masked.shape[1]
    lists = [correct_answers(masked) for masked in decode(batch.masked)]
    lists = [[min(answers)] if only_smallest else answers for answers in lists]
    tokens = [encode("".join(answers)).view(-1, T) for answers in lists]  # each (n,T)
    n = max(map(len, tokens))
    answers = torch.stack([F.pad(x, (0, 0, 0, n - len(x))) for x in tokens])  # (N,n,T)
    there = torch.arange(n) < torch.tensor([[len(x)] for x in tokens])  # (N,n)
    return answers, there


def slow(base: Policy, batch: Batch, share: float, order: tuple[int, ...]) -> Tensor:  # (N,1,T)
    """Let the base model fill one position a pass, in this order (by default left to right).

    Of the characters that are at least `share` times as probable as the likeliest one, it takes the
    first in the vocabulary.
    """
    filled, left = batch.masked.clone(), batch.mask.clone()  # (N,T)
    for t in order or range(filled.shape[1]):
        rows = left[:, t].nonzero()[:, 0]  # (n,)
        if len(rows):
            q = base(filled[rows]).log_marginals()[:, t].exp()  # (n,V)
            plausible = q >= share * q.amax(dim=-1, keepdim=True)  # (n,V)
            filled[rows, t] = plausible.int().argmax(dim=-1)  # the first one
            left[rows, t] = False
    if left.any():
        raise Mistake(f"order={order} leaves blanks; name all positions that are hidden")
    return filled[:, None]


@torch.no_grad()
def search(
    base: Policy, batch: Batch, rewards: Rewards, threshold: float | None
) -> tuple[Tensor, Tensor]:
    """Find the smallest first number whose sum earns more than a threshold: -> (N,1,T), (N,1) bool.

    The base model fills in the second number, in one pass. Where no sum does, there's no answer.
    Without a threshold, try them all, and take the one that earns most.
    """
    first = batch.mask.clone()  # (N,T) the blanks of the first number
    first[:, FIRST:] = False
    blanks = first.sum(dim=1)  # (N,)
    place = blanks[:, None] - first.cumsum(dim=1)  # (N,T) 0 at the last of them, then 1, ...
    # no number begins with 0, so if its first digit is hidden, begin at 1, 10 or 100
    start = torch.where(batch.mask[:, 0], 10 ** (blanks - 1), 0)  # (N,)
    answers, there = batch.tokens.clone(), torch.zeros(len(first), dtype=torch.bool)
    to_beat = torch.full(blanks.shape, -torch.inf if threshold is None else threshold)  # (N,)
    for i in range(10**FIRST):
        number = start + i  # (N,)
        left = number < 10**blanks  # (N,)
        if threshold is not None:
            left &= ~there
        rows = left.nonzero()[:, 0]  # (n,)
        if not len(rows):
            break
        digits = ZERO + number[rows, None] // 10 ** place[rows] % 10  # (n,T)
        filled = torch.where(first[rows], digits, batch.masked[rows])  # (n,T)
        guess = base(filled).best_guess()  # (n,T)
        reward, _ = rewards(guess[:, None], batch[rows].first(1))  # (n,1)
        found = reward[:, 0] > to_beat[rows]  # (n,)
        answers[rows[found]] = guess[found]
        to_beat[rows[found]] = reward[found, 0]
        there[rows[found]] = True
    return answers[:, None], there[:, None]


def answer(
    kind: str,
    batch: Batch,
    models: Models,
    rewards: Rewards | None = None,
    share: float = 1.0,
    order: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Answer the inputs of a batch: -> answers (N,n,T), and which of them are there (N,n) bool.

    models.policy is the student. If there are `rewards`, only answers that earn more than 0 are
    there. `share` and `order` are those of slow().
    """
    if kind in SEARCHED:
        return search(models.base, batch, rewards, 0.0 if kind == "search" else None)
    there = None
    if kind in ("all", "smallest"):
        answers, there = correct(batch, only_smallest=kind == "smallest")
    elif kind in DRAWN:
        answers = models.policy(batch.masked).sample(batch).completions  # (N,16,T)
    elif kind == "slow":
        answers = slow(models.reader, batch, share, order)
    else:
        answers = batch.tokens[:, None]
    if there is None:
        there = torch.ones(answers.shape[:2], dtype=torch.bool)
    if rewards:
        reward, _ = rewards(answers, batch.first(answers.shape[1]))  # (N,n)
        threshold = 0.0
        if kind == "above":
            threshold = reward.mean(dim=1, keepdim=True)  # (N,1)
            there = there & ~all_equal(reward)
        there = there & (reward > threshold)
    return answers, there


class Answers:
    """The answered inputs of a round."""

    @torch.no_grad()
    def __init__(
        self, kind: str, models: Models, rewards, options, tokens: Tensor, mask: Tensor, seed: tuple
    ):
        self.tokens, self.mask = tokens, mask  # (N,T)
        parts = []
        for start in range(0, len(tokens), PART):
            rows = slice(start, start + PART)
            batch = make_batch(tokens[rows], mask[rows], SAMPLES, (*seed, start))
            parts.append(answer(kind, batch, models, rewards, **options))
        most = max(there.shape[1] for _, there in parts)
        pad = [
            (F.pad(y, (0, 0, 0, most - y.shape[1])), F.pad(w, (0, most - w.shape[1])))
            for y, w in parts
        ]
        self.answers, self.there = (torch.cat(x) for x in zip(*pad))  # (N,n,T), (N,n)

    def loss(self, policy, rows: Tensor, power: float) -> Tensor:  # rows (B,) -> ()
        """Compute (1 − p^λ) / λ, or −log p, averaged over inputs that have an answer."""
        masked = self.tokens[rows].masked_fill(self.mask[rows], MASK_ID)  # (B,T)
        log_q = policy(masked).log_likelihood(self.answers[rows]).double().sum(dim=-1)  # (B,n)
        there = self.there[rows]  # (B,n)
        log_p = log_q.where(there, NOTHING).logsumexp(dim=1)  # (B,)
        loss = (1 - (power * log_p).exp()) / power if power else -log_p  # (B,)
        known = there.any(dim=1)  # (B,)
        return loss.where(known, 0).sum() / known.sum().clamp(min=1)


DRAWN = ["accepted", "above"]
SEARCHED = ["search", "scan"]
KINDS = ["any", "smallest", "all", "slow", *SEARCHED, *DRAWN]


@dataclass
class Settings:
    start: str = ""  # the generator that learns [generator_checkpoint]
    reward: str = ""  # an answer has to earn more than 0 [searches and what's drawn: judge]
    inputs: int = 100_000  # how many inputs it learns from
    updates: int = 1200
    rounds: int = 1  # how often to answer new inputs
    batch_size: int = 128  # inputs of an update
    rate: float = 2e-3  # peak learning rate
    adamw: bool = False  # use GRPO's optimizer, not pretraining's Muon
    power: float = 0.0  # λ: 0 is -log p, 1 is 1 - p
    share: float = within(1.0, TINY, 1)  # of slow: how probable is enough
    order: str = ""  # of slow: 2-6-1-5-0-4 fills the ones first
    seed: int = 1


def read(arguments: list[str]) -> tuple[str, Path, Config, Settings]:
    """Read the command line: -> what it learns, its folder, config, settings. Raises a Mistake."""
    configs = [x for x in arguments if x.endswith(".py") and not x.startswith("-")]
    rest = [x for x in arguments if x not in configs]
    given, words = read_arguments(Settings, rest, __doc__)
    if len(words) != 2 or words[0] not in KINDS:
        raise Mistake(f"name what it learns ({', '.join(KINDS)}), and a folder to write")
    args = Settings(**given)
    config = replace(load_config(configs), reward=args.reward or "judge")
    if words[0] in ("smallest", "all", *SEARCHED) and config.dataset != "sums":
        raise Mistake(f"{words[0]} is for sums; name another, or dataset=sums")
    if args.updates % args.rounds or args.inputs % args.rounds:
        raise Mistake(f"rounds={args.rounds} has to divide both inputs and updates; change one")
    places = args.order.split("-") if args.order else []
    if not all(place.isdigit() and int(place) < config.block_size for place in places):
        raise Mistake(f"order={args.order} isn't positions such as 2-6-1-5-0-4; change it")
    return words[0], Path(words[1]), config, args


def teach(kind: str, out_dir: Path, config: Config, args: Settings) -> None:
    """Let the student learn the answers, and write it."""
    check_new(out_dir)
    order = tuple(int(place) for place in args.order.split("-") if args.order)
    options = {"share": args.share, "order": order}  # of slow
    models = load_models(config, CPU)
    start = args.start or config.generator_checkpoint
    student = load_model(start, Generator)
    check_fit(start, student, config.block_size)
    train, _ = load_splits(config, student.vocab_size)
    rewards = None
    if args.reward or kind in (*SEARCHED, *DRAWN):
        rewards = load_rewards(config, models, train.rule, CPU)
    policy = make_policy(student, config, CPU)
    models = models._replace(policy=policy)
    size, length = args.inputs // args.rounds, args.updates // args.rounds
    answers = None

    def loss(step):
        nonlocal answers
        if step % length == 0:
            seed = (args.seed, step // length)
            inputs = train.batch(size, config.masking, seed)
            answers = Answers(kind, models, rewards, options, *inputs, seed)
        rng = np.random.default_rng((PRETRAINING, args.seed, 0, step))
        rows = rng.choice(size, args.batch_size, replace=args.batch_size > size)  # (B,)
        return answers.loss(policy, torch.from_numpy(rows), args.power)

    optimizers = make_optimizers(student, args.rate)
    if args.adamw:
        optimizers = [make_adamw(student, replace(config, learning_rate=args.rate))]
    fit("student", student, loss, args.updates, optimizers)
    write(out_dir / "generator.pt", model_file(student, torch.float16))
    prompts = decode(answers.tokens.masked_fill(answers.mask, MASK_ID))
    write(out_dir / "prompts.json", json.dumps({"prompts": prompts}).encode())


def main(arguments: list[str]) -> None:
    teach(*read(arguments))


if __name__ == "__main__":
    run_program(main)
