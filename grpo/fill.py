"""Talk to the generator: a text with blanks, each filled from one forward pass, before and after GRPO.

    python -m grpo.fill "the ___ sat on the mat"                  # before: the pretrained model; after: out/checkpoint.pt, if it is there
    python -m grpo.fill "th_ c_t" --checkpoint=out-b/checkpoint.pt --k=8 --temperature=0.7

Letters: k draws, of which n are different, T characters, V vocabulary. Each different fill stands once, the likeliest first: the exact probability of
drawing it, the judge's mean score, how often it was drawn. Nothing is truncated or penalised. On a terminal each character is the redder the surer the
judge is that it was filled in, and blanks are underlined; elsewhere they stand in [brackets].
"""

from pathlib import Path

import torch

from data.char_diffusion.prepare import BLANK
from data.dataset import encode
from grpo.plumbing.checkpoint import build, load_model, read
from grpo.plumbing.config import Config, Parser, convert, exit_on_mistake
from grpo.plumbing.log import colours, highlight
from grpo.reward import judge_scores
from grpo.sampling import sample_completions
from grpo.stats import stats_forward
from grpo.rollout import draw_uniforms
from grpo.words import decode


@torch.no_grad()
def fill(generator, judge, masked, mask, k, temperature, seed):
    """-> of the n different ones of k draws, the likeliest first: fills (n,T), probabilities (n,), the judge's P(real) (n,T), counts (n,). masked, mask (1,T)"""
    logits = generator(masked)  # (1,T,V)
    draws, kept = sample_completions(
        logits, masked, mask, draw_uniforms(1, k, masked.shape[1], (seed,)), temperature
    )  # (1,k,T), (1,T,V)
    fills, counts = draws[0].unique(dim=0, return_counts=True)  # (n,T), (n,)
    logp, *_ = stats_forward(
        logits, logits, fills[None], kept, mask, temperature
    )  # (1,n,T), 0 where there is no blank
    probability, scores = (
        logp[0].sum(dim=-1).exp(),
        judge_scores(judge, fills[None])[0],
    )  # (n,), (n,T)
    order = probability.argsort(descending=True)
    return fills[order], probability[order], scores[order], counts[order]


def shade(text, mask, scores):
    """`highlight`, on a terminal with the judge's view behind it, from black to red: text of T characters, mask, scores (T,) -> str."""
    if not colours():
        return highlight(text, mask)
    reds = (
        16 + 36 * round(5 * (1 - score)) for score in scores
    )  # of the terminal's 6 x 6 x 6 colours
    return "".join(
        f"\033[{'4;' if blank else ''}97;48;5;{red}m{c}\033[0m"
        for c, blank, red in zip(text, mask, reds)
    )


def main(argv=None):
    parser = Parser(
        prog="python -m grpo.fill",
        description="Fill the blanks of a text in one parallel step, before and after GRPO.",
    )
    parser.add_argument("text", help=f"for example 'th{BLANK} c{BLANK}t', {BLANK} for a blank")
    parser.add_argument(
        "--checkpoint",
        help="after: a generator that GRPO trained; by default out/checkpoint.pt if it is there",
    )
    parser.add_argument(
        "--before", default=Config.generator_checkpoint, help="the generator that it started from"
    )
    parser.add_argument("--judge", default=Config.judge_checkpoint, help="who scores the fills")
    parser.add_argument("--k", type=int, default=5, help="draws")
    parser.add_argument("--temperature", default=1.0, help="below 1 the likely becomes likelier")
    parser.add_argument("--seed", default=1, help="of the draws")
    with exit_on_mistake("fill"):
        args = parser.parse_args(argv)
        temperature, seed = (
            convert(name, getattr(args, name), "command line") for name in ("temperature", "seed")
        )
        if not 1 <= args.k <= 1024:
            raise ValueError(
                f"k={args.k} is not allowed; k (draws) takes a whole number from 1 to 1024"
            )
        content = read(args.before)
        vocabulary = content.get("vocabulary") if isinstance(content, dict) else None
        models = {f"before  {args.before}": build(content, "generator", vocabulary, args.before)}
        after, judge = (
            args.checkpoint or f"{Config.out_dir}/checkpoint.pt",
            load_model(args.judge, "judge", vocabulary),
        )
        if args.checkpoint or Path(after).exists():
            models[f"after   {after}"] = load_model(after, "generator", vocabulary)
        masked = encode(
            args.text,
            vocabulary,
            min(model.trunk.config.block_size for model in (judge, *models.values())),
            "text",
        )[None]  # (1,T)
    mask = masked == vocabulary.index(BLANK)  # (1,T)
    for title, generator in models.items():
        fills, *columns = fill(generator, judge, masked, mask, args.k, temperature, seed)
        print(f"{title}\n  probability  judge  drawn")
        for text, probability, scores, count in zip(decode(fills, vocabulary), *columns):
            print(
                f"  {probability:11.2g}  {scores.mean():5.3f}  {count:>3}/{args.k}  {shade(text, mask[0].tolist(), scores.tolist())}"
            )


if __name__ == "__main__":
    main()
