"""Train the models that GRPO starts from: the generator (fill the blanks), then the judge.

    python -m model.pretrain --out_dir=out-pretrain            # both: over an hour on 2 CPU cores
    python -m model.pretrain --out_dir=out-pretrain --resume   # go on where it was stopped
    python -m model.pretrain --out_dir=out-coin --n_latent=8 --start=model/pretrained/generator.pt

What they learn from is in `model/losses.py`: the generator to fill masked characters, the judge,
which starts as a copy of it, to tell fills from text. Then `model/report.py` says how well they do.

Letters: V vocabulary, C width, K values of the generator's latent.
"""

import grpo  # noqa: F401 (first: it answers Ctrl-C while the others are imported)

# isort: split

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from data.masking import parse_masking
from grpo.plumbing.checkpoint import load_model, model_file, read, write
from grpo.plumbing.config import Config, Parser, exit_on_mistake
from grpo.plumbing.setup import forward, load_data, pick_device
from grpo.plumbing.stop import Signals
from model.losses import DOUBT, MASKING, generator_loss, judge_loss, words_by_length
from model.muon import Muon
from model.report import report
from model.transformer import Generator, Judge, TransformerConfig

SAVE_INTERVAL = 500


def make_optimizers(model, learning_rate):
    """Muon for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.trunk.blocks.parameters() if p.dim() == 2]
    taken = set(matrices)
    rest = [p for p in model.parameters() if p not in taken]
    muon = Muon(matrices, lr=learning_rate, weight_decay=0.05)
    adamw = torch.optim.AdamW(rest, lr=learning_rate / 4, betas=(0.9, 0.98), weight_decay=0.05)
    return muon, adamw


def schedule(step, steps):
    """Share of the peak learning rate: a linear warm-up, and a cosine to zero."""
    warm_up = (step + 1) / min(200, 1 + steps // 5)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(warm_up, cosine)


def fit(name, model, loss_fn, steps, learning_rate, args):
    """Minimise `loss_fn(step)`. Saved every SAVE_INTERVAL steps and on a signal, for --resume."""
    state_file = Path(args.out_dir) / f"{name}_state.pt"
    recipe = {k: v for k, v in vars(args).items() if k not in ("resume", "out_dir", "device")}
    optimizers = make_optimizers(model, learning_rate)
    parts = (model, *optimizers)
    start = 0
    if args.resume and state_file.exists():
        state = read(state_file)
        if state.get("recipe") != recipe:
            raise ValueError(
                f"--resume: {state_file} was made with {state.get('recipe')}, now asked for"
                f" {recipe}; repeat its arguments, or name a new --out_dir"
            )
        start = state["step"]
        for part, saved in zip(parts, state["parts"]):
            part.load_state_dict(saved)
    bar = tqdm(total=steps, initial=start, desc=name, dynamic_ncols=True, mininterval=1)
    with bar, Signals() as signals:
        for step in range(start, steps):
            loss = loss_fn(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = optimizer.defaults["lr"] * schedule(step, steps)
                optimizer.step()
            model.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            bar.update()
            done = step + 1
            stop = signals.requested()
            if stop or done % SAVE_INTERVAL == 0 or done == steps:
                states = [part.state_dict() for part in parts]
                write(state_file, {"parts": states, "step": done, "recipe": recipe})
            if stop:
                bar.close()
                told = f"stopped after step {done} of {steps} of the {name}"
                print(f"pretrain: {told}; the same command with --resume goes on", file=sys.stderr)
                sys.exit(128 + stop)


def begin_from(path, generator, vocabulary):
    """Take over the weights of a generator's file.

    Where `generator` has more values of the latent than the file, its head becomes copies of the
    file's, and noise that makes them differ.
    """
    saved = load_model(path, "generator", vocabulary)
    have = saved.trunk.config
    want = generator.trunk.config
    copies = want.n_latent // have.n_latent
    if replace(have, n_latent=copies * have.n_latent) != want:
        raise ValueError(
            f"--start={path} holds {have}, which cannot become {want}; repeat its flags"
        )
    generator.trunk.load_state_dict(saved.trunk.state_dict())
    with torch.no_grad():
        head = saved.head.weight.repeat(copies, 1)  # (K·(V-1),C)
        noise = torch.randn_like(head) * head.std() * 0.1  # (K·(V-1),C)
        generator.head.weight.copy_(head + noise if copies > 1 else head)


def pretrain(args, device, train, val):
    """Both models, one after the other; each is written, in float16, as soon as it is done."""
    out = Path(args.out_dir)
    vocabulary = train.vocabulary
    words = words_by_length(train)
    torch.manual_seed(args.seed)
    shape = TransformerConfig(
        vocab_size=len(vocabulary),
        block_size=args.block_size,
        n_layer=args.n_layer,
        n_head=args.n_embd // 32,
        n_embd=args.n_embd,
        n_latent=args.n_latent,
    )
    generator = Generator(shape)
    if args.start:
        begin_from(args.start, generator, vocabulary)
    judge = Judge(replace(shape, n_layer=args.judge_layers or args.n_layer, n_latent=1))
    generator.to(device)
    judge.to(device)

    def as_functions(dtype):
        """The two models, of tokens."""
        config = Config(dtype=dtype, compile="false")
        return [forward(model, device, config) for model in (generator, judge)]

    generate, score = as_functions(args.dtype)

    def loss_of_generator(step):
        return generator_loss(generate, train, args, (args.seed, 0, step))

    def loss_of_judge(step):
        seed = (args.seed, 1, step)
        return judge_loss(score, generate, train, words, args.batch_size, args.block_size, seed)

    peak = 2e-3 if args.start else 8e-3
    fit("generator", generator, loss_of_generator, args.generator_steps, peak, args)
    write(out / "generator.pt", model_file(generator, vocabulary, torch.float16))
    judge.trunk.load_state_dict(generator.trunk.state_dict(), strict=False)  # its first layers
    fit("judge", judge, loss_of_judge, args.judge_steps, 4e-3, args)
    with torch.no_grad():
        judge.head.bias -= DOUBT
    write(out / "judge.pt", model_file(judge, vocabulary, torch.float16))

    report(*as_functions("float32"), val, words, args.block_size)


SHAPE = {  # default, least, about
    "block_size": (64, 5, "characters per input"),
    "n_layer": (6, 1, "layers of the generator"),
    "judge_layers": (0, 0, "layers of the judge, 0: as many, at most n_layer"),
    "n_embd": (128, 32, "width, a multiple of 32"),
    "n_latent": (1, 1, "values of the latent that all blanks of a completion see"),
}
NUMBERS = SHAPE | {
    "generator_steps": (11000, 1, "steps"),
    "judge_steps": (2400, 1, "steps"),
    "batch_size": (64, 2, "inputs per step"),
    "seed": (1, 0, "of weights, inputs and draws"),
}


def make_parser():
    parser = Parser(
        description="Train the generator, then the judge.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", default="char_diffusion", help="folder under data/, made by prepare.py")
    add("--out_dir", default="out-pretrain", help="generator.pt and judge.pt are written here")
    add("--masking", default=MASKING, help="what is hidden from the generator")
    add("--start", default="", help="a generator's file to begin from; none: random weights")
    for name, (default, _, about) in NUMBERS.items():
        add(f"--{name}", type=int, default=default, help=about)
    add(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="bfloat16: a step in two thirds of the time, on a CPU that multiplies it",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1; auto: cuda where there is one")
    add("--resume", action="store_true", help="go on from what the same command saved in out_dir")
    return parser


def check(args):
    """Raises ValueError for numbers that no model can have, or nothing to resume from."""
    parse_masking(args.masking)
    for name, (_, least, about) in NUMBERS.items():
        value = getattr(args, name)
        if value < least or name == "n_embd" and value % 32:
            raise ValueError(
                f"--{name}={value} is not allowed; {name} ({about}) takes a whole number of"
                f" {least} or more"
            )
    if args.judge_layers > args.n_layer:
        raise ValueError(
            f"--judge_layers={args.judge_layers} is more than --n_layer={args.n_layer}; the judge"
            " starts from the generator's first layers: name as many or fewer"
        )
    state_file = Path(args.out_dir) / "generator_state.pt"
    if args.resume and not state_file.exists():
        raise ValueError(
            f"--resume goes on from {state_file}, and there is none; leave --resume out to begin"
        )


def main(argv=None):
    with exit_on_mistake("pretrain"):
        args = make_parser().parse_args(argv)
        check(args)
        device = pick_device(args.device)
        train, val = load_data(args.dataset, args.block_size)
        # A folder that cannot be is noticed now, not after an hour.
        Path(args.out_dir).mkdir(parents=True, exist_ok=True)
        pretrain(args, device, train, val)


if __name__ == "__main__":
    main()
