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
that the model writes this completion in one pass, without truncation or penalty. Sums are `correct`
or `wrong`. If the run has a judge, it has `accepted` a completion when each hidden word scores
above 0, and `rejected` the rest.

All blanks between two spaces count as one word: h_l_ is one, and so is a sum.

Shapes: T characters, V vocabulary, n completions.
"""

import math

import torch
from torch import Tensor

from data.dataset import MADE, encode_prompt
from data.files import find
from data.per_word import mean_over_blanks, number_words
from data.rules import SumRule
from data.sums.rule import SUM, is_correct
from data.user_mistake import Mistake, exit_on_mistake
from data.vocabulary import BLANK, MASK_ID, SPACE, decode, encode, highlight
from grpo.batch import Batch, make_batch
from grpo.reward import Rewards, accepts, log_odds
from grpo.run.checkpoint import load_model, read
from grpo.run.config import Config, Parser
from grpo.run.load import load_rewards
from grpo.run.network import make_policy
from model.transformer import Generator, Judge

WIDTH = 256  # how many beginnings the search keeps


def batch_of(masked: Tensor) -> Batch:
    """Make a batch of one input, masked (T,)."""
    tokens = masked[None]  # (1,T)
    mask = tokens == MASK_ID  # (1,T)
    return make_batch(tokens, mask, number_words(tokens == SPACE, mask), 1, (0,))


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


def show(
    model: Generator,
    masked: Tensor,
    judge: Judge | None,
    rewards: Rewards | None,
    k: int,
    temperature: float,
) -> None:
    """Print k completions of masked (T,), each with what we know about it."""
    batch = batch_of(masked)
    is_sum = SUM.fullmatch(decode(masked)[0].replace(BLANK, "1"))
    print("  probability")
    for text, log_prob in fill(model, masked, k, temperature):
        cells = [f"  {math.exp(log_prob):11.2g}"]
        if is_sum:
            cells.append("correct" if is_correct(text) else "wrong")
        completions = encode(text)[None, None]  # (1,1,T)
        if judge:
            scores = log_odds(judge, completions, batch)  # (1,1,T)
            cells.append("accepted" if accepts(scores, batch.words) == 1 else "rejected")
        if rewards:
            reward, _ = rewards(completions, batch)  # (1,1,T)
            cells.append(f"{mean_over_blanks(reward, batch.mask).item():6.3f}")
        print(*cells, highlight(text, batch.mask[0].tolist()), sep="  ")


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m grpo.tools.fill", description="Fill in the blanks of texts.")
    parser.add_argument("text", nargs="+", help="such as 'th_ c_t', with a _ for each blank")
    parser.add_argument("--run", default="out", help="a run's folder or a generator's file [out]")
    parser.add_argument("--reward", help="also show this reward, such as my.py:f")
    parser.add_argument("--k", type=int, choices=range(1, 21), default=5, help="how many to show")
    with exit_on_mistake("fill"):
        args = parser.parse_args(arguments)
        file = args.run
        if not find(file).exists():
            raise Mistake(f"there is no {file}; make a run, or name another with --run")
        after = load_model(file, Generator)
        models, judge, temperature = {str(file): after}, None, 1.0
        longest = after.trunk.config.block_size
        training = read(file).get("training")
        if training:  # this is a run's checkpoint, so also show the generator it began with
            config = training["config"]
            base, judge_file = config["generator_checkpoint"], config["judge_checkpoint"]
            models = {f"before  {base}": load_model(base, Generator), f"after   {file}": after}
            judge = load_model(judge_file, Judge) if judge_file else None
            temperature = config["temperature"]
            longest = config["block_size"]  # the judge may not know longer texts
        rewards = None
        if args.reward:
            asked = Config(block_size=longest, reward=args.reward, generator_checkpoint=file)
            rewards = load_rewards(asked, judge, SumRule(), torch.device("cpu"))
        for text in args.text:
            sums = training and config["dataset"] in MADE
            if sums and not SUM.fullmatch(text.replace(BLANK, "1")):
                raise Mistake(
                    f"text {text!r} isn't a sum, which is all that {file} learned to fill"
                )
            masked = encode_prompt(text, longest, "text", after.vocab_size)  # (T,)
            for title, model in models.items():
                print(title)
                show(model, masked, judge, rewards, args.k, temperature)


if __name__ == "__main__":
    main()
