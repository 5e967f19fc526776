"""Fill the blanks of texts in one parallel step, before and after GRPO.

    python -m grpo.tools.fill "this function returns a ____ of strings"     # uses the run in out
    python -m grpo.tools.fill "th_ c_t" "_ d_g" --run=out-b --k=8 --temperature=0.7

In a program of your own:

    from grpo.tools.fill import fill, load

    generator, vocabulary = load("out")
    for one in fill(generator, vocabulary, "this function returns a ____ of strings"):
        print(one.text, one.log_prob)

The command prints each different completion once, the likeliest first. A line begins with the exact
probability of drawing this completion. Then come the judge's P(real), averaged over the blanks, and
the text. The filled-in letters are coloured on a terminal, and stand in [brackets] elsewhere.

Shapes: k draws, of which n are different, T characters.
"""

import math
from typing import NamedTuple

import torch

from data.dataset import decode, encode
from data.lexicon import highlight
from data.per_word import mean_over_blanks, number_words
from data.text.prepare import BLANK
from data.user_mistake import refuse
from grpo.batch import make_batch
from grpo.plumbing.checkpoint import LATEST, build, find, load_model, read
from grpo.plumbing.command_line import Parser, convert, exit_on_mistake
from grpo.plumbing.config import Config, from_saved
from grpo.plumbing.load import check_length
from grpo.policy import Policy
from grpo.reward import log_odds


class Completion(NamedTuple):
    text: str
    log_prob: float  # nats, the exact log-probability of drawing this text


def locate(path):
    """Find a generator's file. If `path` is a run's folder, take its checkpoint: -> Path."""
    file = find(path)
    return file / LATEST if file.is_dir() else file


def load(path):
    """Load a generator from a run's folder or from a file: -> generator, vocabulary."""
    file = locate(path)
    content = read(file)
    vocabulary = content["vocabulary"]
    return build(content, "generator", vocabulary, file), vocabulary


@torch.no_grad()
def fill(generator, vocabulary, text, k=5, temperature=1.0, seed=1):
    """Fill the blanks of a text k times: -> the different `Completion`s, the likeliest first."""
    masked = encode(text, vocabulary, generator.trunk.config.block_size, "text")[None]  # (1,T)
    mask_id = vocabulary.index(BLANK)
    batch = make_batch(masked, masked == mask_id, mask_id, k, (seed,))
    config = Config(temperature=temperature, dtype="float32", compile="false")
    q = Policy(generator, config, torch.device("cpu"))(batch)
    drawn = q.sample(batch.uniforms).completions  # (1,k,T)
    log_p = q.log_prob(drawn).sum(dim=-1)[0]  # (k,)
    log_probs = dict(zip(decode(drawn, vocabulary), log_p.tolist()))
    different = [Completion(*one) for one in log_probs.items()]
    return sorted(different, key=lambda one: -one.log_prob)


def show(completions, judge, vocabulary, mask):
    """Print each completion of one text on a line, with its probability and the judge's P(real)."""
    tokens = [[vocabulary.index(c) for c in one.text] for one in completions]  # (n,T)
    blanks = torch.tensor([mask])  # (1,T)
    scores = log_odds(judge, torch.tensor([tokens]), number_words(blanks))  # (1,n,T)
    scores = mean_over_blanks(scores.sigmoid(), blanks)[0].tolist()  # n numbers
    print("  probability  judge")
    for one, score in zip(completions, scores):
        shown = highlight(one.text, mask)
        print(f"  {math.exp(one.log_prob):11.2g}  {score:5.3f}  {shown}")


def parse(arguments):
    parser = Parser(
        prog="python -m grpo.tools.fill",
        description="Fill the blanks of texts in one parallel step, before and after GRPO.",
    )
    text_help = f"such as 'th{BLANK} c{BLANK}t', with a {BLANK} for each letter to fill in"
    parser.add_argument("text", nargs="+", help=text_help)
    run_help = "a run's folder or a generator's file; default: out, or else the shipped generator"
    parser.add_argument("--run", help=run_help)
    parser.add_argument("--judge", help="file of the judge that scores; default: the run's judge")
    parser.add_argument("--k", type=int, default=5, help="draws for each text; default: 5")
    temperature_help = "softmax temperature of the draws; below 1, likely letters become likelier"
    parser.add_argument("--temperature", default=1.0, help=temperature_help)
    args = parser.parse_args(arguments)
    args.temperature = convert(Config, "temperature", args.temperature, "--temperature")
    refuse(args.k < 1, f"--k={args.k} draws nothing; it takes 1 or more")
    if not args.run:
        there = locate(Config.out_dir).is_file()
        args.run = Config.out_dir if there else Config.generator_checkpoint
    return args


def main(arguments=None):
    with exit_on_mistake("fill"):
        args = parse(arguments)
        file = locate(args.run)
        after, vocabulary = load(file)
        training = read(file).get("training")
        config = Config()
        models = {}
        if training:  # this is a run's checkpoint, so also show the generator it began with
            config = from_saved(training["config"], file)
            path = config.generator_checkpoint
            models[f"before  {path}"] = load_model(path, "generator", vocabulary)
        models[f"after   {file}" if models else str(file)] = after
        judge = load_model(args.judge or config.judge_checkpoint, "judge", vocabulary)
        longest = after.trunk.config.block_size
        check_length(longest, judge)
        for text in args.text:
            masked = encode(text, vocabulary, longest, "text")  # (T,)
            (shown,) = decode(masked, vocabulary)
            if shown != " ".join(text.lower().split()):
                print(f"only a to z and space are read, so this is: {shown}")
            mask = (masked == vocabulary.index(BLANK)).tolist()
            for title, model in models.items():
                print(title)
                found = fill(model, vocabulary, text, args.k, args.temperature)
                show(found, judge, vocabulary, mask)


if __name__ == "__main__":
    main()
