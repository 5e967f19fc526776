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
from data.files import shipped_path
from data.rules import Rule, SumRule
from data.sums.rule import SUM
from data.user_mistake import Mistake, exit_on_mistake
from data.vocabulary import BLANK, MASK_ID, decode, encode, highlight
from grpo.batch import Batch, make_batch
from grpo.reward import Rewards, judge_scores
from grpo.run.checkpoint import load_model, read, training_state
from grpo.run.config import Config, Parser
from grpo.run.load import load_rewards, load_splits
from grpo.run.network import make_policy
from grpo.run.origin import differences, made_with
from model.transformer import Generator, Judge

WIDTH = 256  # how many beginnings the search keeps


def batch_of(masked: Tensor) -> Batch:
    """Make a batch of one input, masked (T,)."""
    tokens = masked[None]  # (1,T)
    return make_batch(tokens, tokens == MASK_ID, 1, (0,))


@torch.no_grad()
def fill(
    generator: Generator, masked: Tensor, k: int = 5, temperature: float = 1.0
) -> list[tuple[str, float]]:
    """Find the k most probable completions of masked (T,), each with its log-probability in nats.

    It's a beam search: fill the blanks from left to right, and keep the 256 best beginnings. With
    independent blanks it can't miss any of the k, because the best completions have the best
    beginnings. With a latent it could, but only if there are more than two blanks.
    """
    batch = batch_of(masked)
    config = Config(temperature=temperature)
    q = make_policy(generator, config, torch.device("cpu"))(batch)
    V = generator.vocab_size
    found = batch.masked[:, None]  # (1,n,T)
    for t in batch.mask[0].nonzero():
        found = found.repeat_interleave(V, dim=1)  # (1,n·V,T)
        found[0, :, t] = torch.arange(found.shape[1])[:, None] % V
        # the log q of a blank doesn't depend on those to its right, so they may be open
        log_prob = q.log_likelihood(found)[0, :, : t + 1].sum(dim=-1)  # (n·V,)
        log_prob, order = log_prob.sort(descending=True, stable=True)
        found = found[:, order[:WIDTH]]  # (1,n,T)
    return list(zip(decode(found), log_prob.tolist()))[:k]


def show(model: Generator, masked: Tensor, known: "Known", k: int) -> None:
    """Print k completions of masked (T,), each with what we know about it."""
    batch = batch_of(masked)
    (blanks,) = decode(masked)
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
        print(*cells, highlight(text, batch.mask[0].tolist()), sep="  ")


@dataclass
class Known:
    """What we know about a model besides its weights: by default nothing."""

    models: dict[str, Generator]  # {title: what to show}
    longest: int  # in characters
    rule: Rule | None = None
    judge: Judge | None = None
    rewards: Rewards | None = None
    temperature: float = 1.0


def load(file: str, texts: list[str], reward: str | None) -> Known:
    """Load a run, also the generator it began with and its judge, or just a generator's file."""
    if not shipped_path(file).exists():
        raise Mistake(f"there is no {file}; make a run, or name another with --run")
    after = load_model(file, Generator)
    known = Known({str(file): after}, after.trunk.config.block_size)
    config = Config(generator_checkpoint=file, block_size=known.longest)
    if "training" in read(file):
        state = training_state(file)
        config = Config(**state["config"])
        changed = differences(state["made_with"], made_with(config))
        base = config.generator_checkpoint
        for path in base, config.judge_checkpoint:
            if f"{path} changed" in changed:
                print(f"{path} changed since this run")
        known.models = {f"before  {base}": load_model(base, Generator), f"after   {file}": after}
        known.rule = load_splits(config)[0].rule
        if config.judge_checkpoint:
            known.judge = load_model(config.judge_checkpoint, Judge)
        known.temperature = config.temperature
        known.longest = config.block_size  # the judge may not know longer texts
    elif all(SUM.fullmatch(text.replace(BLANK, "1")) for text in texts):
        known.rule = SumRule()
    if reward:
        asked = replace(config, reward=reward)
        cpu = torch.device("cpu")
        base = make_policy(next(iter(known.models.values())), config, cpu)
        known.rewards = load_rewards(asked, known.judge, base, known.rule, cpu)
    return known


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m grpo.tools.fill", description="Fill in the blanks of texts.")
    parser.add_argument("text", nargs="+", help="such as 'th_ c_t', with a _ for each blank")
    parser.add_argument("--run", default="out", help="a run's folder or a generator's file [out]")
    parser.add_argument("--reward", help="also show this reward, such as my.py:f")
    parser.add_argument("--k", type=int, choices=range(1, 21), default=5, help="how many to show")
    with exit_on_mistake("fill"):
        args = parser.parse_args(arguments)
        known = load(args.run, args.text, args.reward)
        for text in args.text:
            if isinstance(known.rule, SumRule) and not SUM.fullmatch(text.replace(BLANK, "1")):
                raise Mistake(
                    f"text {text!r} isn't a sum, which is all that {args.run} learned to fill"
                )
            for title, model in known.models.items():
                masked = encode_prompt(text, known.longest, "text", model.vocab_size)  # (T,)
                print(title)
                show(model, masked, known, args.k)


if __name__ == "__main__":
    main()
