"""Fill in the blanks, before and after GRPO, and show the most probable completions.

    python -m grpo.tools.fill "4_7+4_1=888" --run=out
    python -m grpo.tools.fill "th_ c_t" "_ d_g" --run=out-text --k=8
    python -m grpo.tools.fill "4_7+4_1=888" --run=model/pretrained/sums.pt

From Python:

    from data.vocabulary import encode
    from grpo.run.checkpoint import load_model
    from grpo.tools.fill import fill
    from model.transformer import Generator

    generator = load_model("out/checkpoint.pt", Generator)
    for text, log_prob in fill(generator, encode("4_7+4_1=888")):
        print(text, log_prob)

Nothing is drawn here, so everybody sees the same list. The first column is the exact probability
that the model writes this completion in one pass, without truncation or penalty. If there's a rule,
a completion is `correct`, `valid`, or whatever the rule is called, or else `wrong`. If the run has
a judge, it has `accepted` a completion with a score above 0, and `rejected` the rest.

Shapes: T characters, V vocabulary, n completions.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.dataset import encode_prompt
from data.rules import Rule, SumRule
from data.sums.rule import SUM
from data.user_mistake import Mistake, run_program
from data.vocabulary import BLANK, MASK_ID, decode, encode, highlight
from grpo.batch import make_batch
from grpo.reward import Rewards, judge_scores
from grpo.run.arguments import read_arguments, within
from grpo.run.checkpoint import load_model, read
from grpo.run.config import Config
from grpo.run.load import load_models, load_rewards, load_splits
from grpo.run.network import make_policy
from model.transformer import Generator

WIDTH = 256  # how many beginnings the search keeps
CPU = torch.device("cpu")


@dataclass
class Settings:
    run: str = "out"  # a run's folder or a generator's file
    reward: str = ""  # also show this reward, such as my.py:f
    k: int = within(5, 1, 20)  # how many completions to show


@torch.no_grad()
def fill(
    generator: Generator, masked: Tensor, k: int = 5, temperature: float = 1.0
) -> list[tuple[str, float]]:
    """Find the k most probable completions of masked (T,), each with its log-probability in nats.

    It's a beam search: fill the blanks from left to right, and keep the 256 best beginnings. With
    independent blanks it can't miss any of the k, because the best completions have the best
    beginnings. With a latent it could, but only if there are more than two blanks.
    """
    found = masked[None, None]  # (1,n,T)
    q = make_policy(generator, Config(temperature=temperature), CPU)(found[0])
    V = generator.vocab_size
    for t in (masked == MASK_ID).nonzero():
        found = found.repeat_interleave(V, dim=1)  # (1,n·V,T)
        found[0, :, t] = torch.arange(found.shape[1])[:, None] % V
        # the log q of a blank doesn't depend on those to its right, so they may be open
        log_prob = q.log_likelihood(found)[0, :, : t + 1].sum(dim=-1)  # (n·V,)
        log_prob, order = log_prob.sort(descending=True, stable=True)
        found = found[:, order[:WIDTH]]  # (1,n,T)
    return list(zip(decode(found), log_prob.tolist()))[:k]


@dataclass
class Known:
    """What we know about a model besides its weights: by default nothing."""

    models: dict[str, Generator]  # {title: what to show}
    longest: int  # in characters
    rule: Rule | None = None
    judge: object = None
    rewards: Rewards | None = None
    temperature: float = 1.0


def load(file: str, texts: list[str], reward: str) -> Known:
    """Load a run, also the generator it began with and its judge, or just a generator's file."""
    after = load_model(file, Generator)
    training = read(file).get("training")
    longest = after.trunk.config.block_size
    config = Config(generator_checkpoint=file, judge_checkpoint="", block_size=longest)
    known = Known({file: after}, longest)
    if training:
        config = replace(Config(**training["config"]), device="cpu", reference_checkpoint="")
        base = config.generator_checkpoint
        known.models = {f"before  {base}": load_model(base, Generator), f"after   {file}": after}
        known.rule = load_splits(config)[0].rule
        known.temperature = config.temperature
        known.longest = config.block_size  # the judge may not know longer texts
    elif all(SUM.fullmatch(text.replace(BLANK, "1")) for text in texts):
        known.rule = SumRule()
    models = load_models(replace(config, compile=False), CPU)
    known.judge = models.judge
    if reward:
        known.rewards = load_rewards(replace(config, reward=reward), models, known.rule, CPU)
    return known


def show(model: Generator, masked: Tensor, known: Known, k: int) -> None:
    """Print k completions of masked (T,), each with what we know about it."""
    blank = masked == MASK_ID  # (T,)
    batch = make_batch(masked[None], blank[None], 1, (0,))
    (blanks,) = decode(batch.masked)
    print("  probability")
    for text, log_prob in fill(model, masked, k, known.temperature):
        cells = [f"  {math.exp(log_prob):11.2g}"]
        if known.rule:
            cells.append(known.rule.name if known.rule.is_good(text, blanks) else "wrong")
        completions = encode(text)[None, None]  # (1,1,T)
        if known.judge:
            score = judge_scores(known.judge, completions, batch).item()
            cells.append("accepted" if score > 0 else "rejected")
        if known.rewards:
            reward, _ = known.rewards(completions, batch)  # (1,1)
            cells.append(f"{reward.item():6.3f}")
        print(*cells, highlight(text, blank.tolist()), sep="  ")


def main(arguments: list[str]) -> None:
    given, texts = read_arguments(Settings, arguments, __doc__)
    settings = Settings(**given)
    if not texts:
        raise Mistake('name a text with blanks: python -m grpo.tools.fill "4_7+4_1=888"')
    known = load(settings.run, texts, settings.reward)
    for text in texts:
        if isinstance(known.rule, SumRule) and not SUM.fullmatch(text.replace(BLANK, "1")):
            raise Mistake(
                f"text {text!r} isn't a sum, which is all that {settings.run} learned to fill"
            )
        for title, model in known.models.items():
            masked = encode_prompt(text, known.longest, "text", model.vocab_size)  # (T,)
            print(title)
            show(model, masked, known, settings.k)


if __name__ == "__main__":
    run_program(main)
