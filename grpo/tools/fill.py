"""Fill the blanks of texts in one parallel step, before and after GRPO.

    python -m grpo.tools.fill "this function returns a ____ of strings"     # uses the run in out
    python -m grpo.tools.fill "th_ c_t" "_ d_g" --run=out-b --k=8 --temperature=0.7
    python -m grpo.tools.fill "4_3+4_5=888" --run=out-sums

In a program of your own:

    from grpo.tools.fill import fill
    from grpo.run.checkpoint import load_model
    from model.transformer import Generator

    generator = load_model("out/checkpoint.pt", Generator)
    for one in fill(generator, "this function returns a ____ of strings"):
        print(one.text, one.log_prob)

The command prints each different completion once, the likeliest first. A line begins with the exact
probability of drawing this completion. Then comes the judge's P(real), averaged over the blanks, or
whether a sum is right, and the text, with the filled-in letters in [brackets]. All blanks between
two spaces are one word, such as the two of h_l_.

Shapes: k draws, of which n are different, T characters.
"""

import math
from typing import NamedTuple

import torch

from data.dataset import encode_prompt, typed_words
from data.files import find
from data.per_word import mean_over_blanks
from data.sums.rule import is_right
from data.user_mistake import Mistake, exit_on_mistake
from data.vocabulary import BLANK, MASK_ID, TEXT_CHARACTERS, decode, encode, highlight
from grpo.batch import make_batch
from grpo.reward import log_odds
from grpo.run.checkpoint import LATEST, load_model, read
from grpo.run.config import Config, Parser, number
from grpo.run.load import check_length
from grpo.run.network import make_policy
from model.transformer import Generator, Judge


def encode_input(generator, text):
    """Turn a text with blanks into tokens (T,) that the generator knows, or raise a Mistake."""
    return encode_prompt(text, generator.trunk.config.block_size, "text", generator.vocab_size)


class Completion(NamedTuple):
    text: str
    log_prob: float  # nats, the exact log-probability of drawing this text


@torch.no_grad()
def fill(generator, text, k=5, temperature=1.0, seed=1):
    """Fill the blanks of a text k times: -> the different `Completion`s, the likeliest first."""
    masked = encode_input(generator, text)[None]  # (1,T)
    blanks = masked == MASK_ID  # (1,T)
    batch = make_batch(masked, blanks, typed_words(masked, blanks), k, (seed,))
    config = Config(temperature=temperature, dtype="float32", compile="false")
    q = make_policy(generator, config, torch.device("cpu"))(batch)
    drawn = q.sample().completions  # (1,k,T)
    log_p = q.log_prob(drawn).sum(dim=-1)[0]  # (k,)
    log_probs = dict(zip(decode(drawn), log_p.tolist()))
    different = [Completion(*one) for one in log_probs.items()]
    return sorted(different, key=lambda one: -one.log_prob)


@torch.no_grad()
def show(completions, judge, masked):
    """Print each completion of masked (T,) on a line, with its probability and what we think of it.

    The judge gives its P(real). Without a judge we say whether a sum is right.
    """
    blanks = masked[None] == MASK_ID  # (1,T)
    if judge:
        tokens = torch.stack([encode(one.text) for one in completions])[None]  # (1,n,T)
        scores = log_odds(judge, tokens, typed_words(masked[None], blanks)).sigmoid()  # (1,n,T)
        opinions = [f"{x:5.3f}" for x in mean_over_blanks(scores, blanks)[0].tolist()]
    else:
        opinions = ["right" if is_right(one.text) else "wrong" for one in completions]
    print("  probability  judge" if judge else "  probability")
    for one, opinion in zip(completions, opinions):
        shown = highlight(one.text, blanks[0].tolist())
        print(f"  {math.exp(one.log_prob):11.2g}  {opinion}  {shown}")


def parse(arguments):
    parser = Parser(
        prog="python -m grpo.tools.fill",
        description="Fill the blanks of texts in one parallel step, before and after GRPO.",
    )
    text_help = f"such as 'th{BLANK} c{BLANK}t', with a {BLANK} for each letter to fill in"
    parser.add_argument("text", nargs="+", help=text_help)
    run_help = "a run's folder or a generator's file; default: out"
    parser.add_argument("--run", default=Config.out_dir, help=run_help)
    positive = number(int, 1, 10**6)
    parser.add_argument("--k", type=positive, default=5, help="draws for each text; default: 5")
    temperature_help = "softmax temperature of the draws; below 1, likely letters become likelier"
    temperature = number(float, 1e-3, 100)
    parser.add_argument("--temperature", type=temperature, default=1.0, help=temperature_help)
    return parser.parse_args(arguments)


def main(arguments=None):
    with exit_on_mistake("fill"):
        args = parse(arguments)
        file = find(args.run)
        shipped = Config.generator_checkpoint
        if not file.exists():
            raise Mistake(f"there is no {args.run}; make a run, or add --run={shipped}")
        file = file / LATEST if file.is_dir() else file
        after = load_model(file, Generator)
        models = {}
        config = vars(Config())
        training = read(file).get("training")
        if training:  # this is a run's checkpoint, so also show the generator it began with
            config = training["config"]
            path = config["generator_checkpoint"]
            models[f"before  {path}"] = load_model(path, Generator)
        models[f"after   {file}" if models else str(file)] = after
        judge = None
        if config["judge_checkpoint"] and after.vocab_size == TEXT_CHARACTERS:  # not of sums
            judge = load_model(config["judge_checkpoint"], Judge)
            check_length(after.trunk.config.block_size, judge)
        for text in args.text:
            masked = encode_input(after, text)  # (T,)
            (known,) = decode(masked[None])
            if known != text:
                print(f'the model reads "{known}"')
            for title, model in models.items():
                print(title)
                show(fill(model, text, args.k, args.temperature), judge, masked)


if __name__ == "__main__":
    main()
