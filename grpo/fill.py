"""Talk to a generator: texts with blanks, each filled in one parallel step, before and after GRPO.

    python -m grpo.fill "this function returns a ____ of strings"
    python -m grpo.fill "th_ c_t" "_ d_g" --checkpoint=out-b/checkpoint.pt --k=8 --temperature=0.7

In a program of your own:

    from grpo.fill import fill, load

    generator, vocabulary = load("out/checkpoint.pt")
    for one in fill(generator, vocabulary, "this function returns a ____ of strings"):
        print(one.text, one.log_prob)

Letters: k draws, of which n are different, T characters, V vocabulary, K values of the latent.
Each different fill stands once, the likeliest first: the exact probability of drawing it, the
judge's mean score, how often it was drawn, and, with a latent, the value that most likely spoke.
Nothing is truncated or penalised. On a terminal each character is the redder the surer the judge is
that it was filled in, from the surest to the least sure of this text, and blanks are underlined;
elsewhere they stand in [brackets].
"""

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import torch

from data.char_diffusion.prepare import ALPHABETS, BLANK, normalise
from grpo import REPOSITORY
from grpo.mixture import draw, log_prob_given_z
from grpo.plumbing.checkpoint import LATEST, build, load_model, read
from grpo.plumbing.config import Config, Parser, convert, exit_on_mistake
from grpo.plumbing.log import colours, highlight
from grpo.reward import judge_scores
from grpo.rollout import draw_uniforms
from grpo.stats import log_mean, log_softmax
from grpo.words import decode


def find(path):
    """`path` as it is; if nothing is there, as the repository has it: commands work anywhere."""
    path = Path(path)
    inside = REPOSITORY / path
    return inside if inside.exists() and not path.exists() else path


@dataclass
class Fill:
    """One of the different fills of a text."""

    text: str
    log_prob: float  # nats, of drawing it, exact, whatever z
    z: int  # the value of the latent that most likely spoke
    drawn: int  # how often


def load(checkpoint):
    """A generator from a file -> generator, vocabulary. ValueError if it holds none."""
    content = read(checkpoint)
    vocabulary = content.get("vocabulary") if isinstance(content, dict) else None
    return build(content, "generator", vocabulary, checkpoint), vocabulary


def clean(text, vocabulary):
    """A text as the models read it: where they know a-z alone, as `prepare` writes it down."""
    if vocabulary != ALPHABETS["text8"] + BLANK:
        return text
    # Between two letters, so that spaces at the ends of a piece stay.
    pieces = [normalise(f"x{piece}x", "text8")[1:-1] for piece in text.split(BLANK)]
    return BLANK.join(pieces).strip()


def tokenise(text, vocabulary, longest):
    """-> (T,) tokens. ValueError that names the rule which the text breaks."""
    unknown = sorted(set(text) - set(vocabulary))
    if unknown:
        raise ValueError(
            f"text {text!r:.100} has {unknown[0]!r}; it takes the characters {vocabulary!r}"
        )
    if not 0 < len(text) <= longest:
        raise ValueError(
            f"text {text!r:.100} has {len(text)} characters; it takes 1 to {longest}, as many as"
            " the models were made for"
        )
    return torch.tensor([vocabulary.index(c) for c in text])


@torch.no_grad()
def fill(generator, vocabulary, text, k=5, temperature=1.0, seed=1):
    """The n different ones of k draws, the likeliest first: a list of `Fill`."""
    text = clean(text, vocabulary)
    masked = tokenise(text, vocabulary, generator.trunk.config.block_size)[None]  # (1,T)
    mask = masked == vocabulary.index(BLANK)  # (1,T)
    uniforms = draw_uniforms(1, k, masked.shape[1], (seed,))  # (1,k,T)
    z_uniforms = draw_uniforms(1, k, 1, (seed, 1)).squeeze(2)  # (1,k)
    logits = generator(masked)  # (K,T,V)
    options = {"temperature": temperature}
    draws = draw(logits, masked, mask, uniforms, z_uniforms, options)  # (1,k,T)
    different, counts = draws[0].unique(dim=0, return_counts=True)  # (n,T), (n,)
    log_p = log_softmax(logits.double(), temperature)  # (K,T,V)
    given_z = log_prob_given_z(log_p, different[None], mask)[0]  # (n,K)
    log_prob = log_mean(given_z, dim=1)  # (n,)
    texts = decode(different, vocabulary)
    columns = (texts, log_prob.tolist(), given_z.argmax(dim=1).tolist(), counts.tolist())
    fills = [Fill(*values) for values in zip(*columns)]
    return sorted(fills, key=lambda one: one.log_prob, reverse=True)


def as_power(log_prob):
    """A probability that is never printed as 0 or as 1: 0.042, 3.1e-310, 1-2e-09."""
    p = Decimal(log_prob).exp()
    missing = max(1 - p, Decimal("1e-16"))
    if missing < Decimal("0.0005"):
        return f"1-{missing:.0e}"
    return f"{p:.3f}" if p >= Decimal("0.01") else f"{p:.1e}"


def shade(text, mask, doubts):
    """`highlight`, on a terminal with the judge's view behind it, from black to red.

    text of T characters, mask (T,), doubts (T,) from 0 to 1
    """
    if not colours():
        return highlight(text, mask)
    shown = []
    for character, blank, doubt in zip(text, mask, doubts):
        red = 16 + 36 * round(5 * doubt)  # of the terminal's 6 x 6 x 6 colours
        underlined = "4;" if blank else ""
        shown.append(f"\033[{underlined}97;48;5;{red}m{character}\033[0m")
    return "".join(shown)


def relative(scores):
    """The judge's P(real) as doubts from 0, where it is surest, to 1, where it doubts most."""
    low = scores.min()
    high = scores.max()
    return (high - scores) / (high - low).clamp(min=1e-6)


def show(text, vocabulary, models, judge, k, temperature, seed):
    """What is printed of one text: `models` {title: generator} -> lines."""
    mask = [c == BLANK for c in text]
    longest = min(model.trunk.config.block_size for model in (judge, *models.values()))
    tokens = tokenise(text, vocabulary, longest)  # (T,)
    if not any(mask):
        scores = judge_scores(judge, tokens[None, None])[0]  # (1,T)
        shown = shade(text, mask, relative(scores)[0].tolist())
        return [f"  no blank ({BLANK}) to fill; judge {scores.mean():.3f}  {shown}"]
    fills = []
    for title, model in models.items():
        of_model = fill(model, vocabulary, text, k, temperature, seed)
        fills += [(title, one) for one in of_model]
    tokens = torch.stack([tokenise(one.text, vocabulary, longest) for _, one in fills])  # (n,T)
    scores = judge_scores(judge, tokens[None])[0]  # (n,T)
    judged = scores.mean(dim=1).tolist()
    lines = []
    for (title, one), score, doubts in zip(fills, judged, relative(scores).tolist()):
        latent = models[title].n_latent > 1
        if title not in lines:
            lines += [title, "  probability  judge  drawn" + latent * "   z"]
        z = f"  {one.z:2d}" if latent else ""
        lines.append(
            f"  {as_power(one.log_prob):>11}  {score:5.3f}  {one.drawn:>3}/{k}{z}"
            f"  {shade(one.text, mask, doubts)}"
        )
    return lines


def arguments(argv):
    parser = Parser(
        prog="python -m grpo.fill",
        description="Fill the blanks of a text in one parallel step, before and after GRPO.",
    )
    about = f"for example 'th{BLANK} c{BLANK}t', {BLANK} for a blank"
    parser.add_argument("text", nargs="*", help=about)
    parser.add_argument("--file", help="texts, one a line")
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
    args = parser.parse_args(argv)
    for name in ("temperature", "seed"):
        setattr(args, name, convert(name, getattr(args, name), "command line"))
    if not 1 <= args.k <= 1024:
        raise ValueError(
            f"k={args.k} is not allowed; k (draws) takes a whole number from 1 to 1024"
        )
    if args.file:
        lines = Path(args.file).read_text(encoding="utf-8-sig").splitlines()
        args.text += [line for line in lines if line.strip()]
    if not args.text:
        raise ValueError(f"there is no text; it takes one or more, or --file, {about}")
    return args


def main(argv=None):
    with exit_on_mistake("fill"):
        args = arguments(argv)
        generator, vocabulary = load(find(args.before))
        judge = load_model(find(args.judge), "judge", vocabulary)
        models = {f"before  {args.before}": generator}
        after = Path(args.checkpoint or Path(Config.out_dir) / LATEST)
        nothing = ""
        if args.checkpoint or after.exists():
            models[f"after   {after}"] = load_model(after, "generator", vocabulary)
        else:
            nothing = f"after   none: there is no {after.resolve()}; name one: --checkpoint=FILE"
        lines = []
        for given in args.text:
            text = clean(given, vocabulary)
            if text != given or len(args.text) > 1:
                lines.append(f"text    {text}")
            lines += show(text, vocabulary, models, judge, args.k, args.temperature, args.seed)
    print("\n".join([*lines, nothing]).rstrip())


if __name__ == "__main__":
    main()
