"""Train the models that GRPO starts from: the generator (fill the blanks), then the judge.

    python -m model.pretrain --out_dir=out-pretrain            # both: over an hour on 2 CPU cores
    python -m model.pretrain --out_dir=out-pretrain --resume   # go on where it was stopped
    python -m model.pretrain --out_dir=out-coin --n_latent=8 --start=model/pretrained/generator.pt

The generator learns masked characters (1810.04805) under every masking that GRPO may use, partly
revealed ones included, since filling blank by blank passes through those. The judge starts as a
copy of it and learns, for every character, whether its word is the original one (after ELECTRA's
replaced-token detection, 2003.10555). Whatever the judge was never shown, GRPO finds; so it sees
originals, the generator's own one-step fills at several temperatures, plainly wrong fills, and
true words in the wrong place.

Letters: B inputs, T characters, V vocabulary, C width, K values of the generator's latent, M blanks
of all inputs, N runs of adjacent blanks. Losses and report take the models as functions of tokens
on the CPU, wherever the weights live.
"""

import grpo  # noqa: F401 (first: it answers Ctrl-C while the others are imported)

# isort: split

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.masking import parse_masking, whole_words
from grpo.plumbing.checkpoint import load_model, model_file, read, write
from grpo.plumbing.config import Config, Parser, exit_on_mistake
from grpo.plumbing.setup import forward, load_data, pick_device
from grpo.plumbing.stop import Signals
from grpo.sampling import sample_completions
from model.muon import Muon
from model.transformer import Generator, Judge, TransformerConfig

MASKING = "word:0.5,random:0.25,span:0.1,sticky:0.15"
SAVE_INTERVAL = 500
# Training showed the judge about as many real words as wrong ones. Of what a policy draws most is
# wrong: the prior odds of "real" are lowered by this factor e^-DOUBT (Bayes' rule, in the logit).
# Else a common word in the wrong place scores most of what the right one does.
DOUBT = 3.0
# Of the fills that the judge sees; 0.1: argmax, all but.
TEMPERATURES = [0.1, 0.4, 0.7, 1.0, 1.25, 1.5]


def masked_batch(dataset, size, block_size, seed, masking=MASKING):
    """Inputs at every difficulty: tokens (B,T), mask (B,T).

    In four rows of ten, part of the blanks is revealed again.
    """
    rng = np.random.default_rng((*seed, 1))
    ratio = rng.uniform(0.1, 0.6, size)  # (B,)
    words = rng.integers(1, 6, size)  # (B,)
    masking = parse_masking(masking)
    tokens, mask = dataset.batch(size, block_size, masking, ratio, words, (*seed, 0))  # (B,T) twice
    hide = np.where(rng.random(size) < 0.6, 1.0, rng.random(size))  # (B,) share that stays hidden
    stays = rng.random(mask.shape) < hide[:, None]  # (B,T)
    return tokens, mask & torch.from_numpy(stays)


def run_log_likelihoods(logits, tokens, mask):
    """log Π_{t in run} q_z,t(y_t) of each run of adjacent blanks under each value of z, in nats.

    logits (B·K,T,V), tokens (B,T), mask (B,T) bool -> (N,K)
    """
    logits = logits.unflatten(0, (len(mask), -1)).transpose(1, 2)  # (B,T,K,V)
    log_q = logits[mask].float().log_softmax(dim=-1)  # (M,K,V)
    hidden = tokens[mask][:, None, None]  # (M,1,1)
    log_q = log_q.take_along_dim(hidden, dim=-1).squeeze(-1)  # (M,K)
    before = F.pad(mask, (1, 0))[:, :-1]  # (B,T) is there a blank just before?
    begins = (mask & ~before)[mask]  # (M,) does a run begin here?
    run = begins.long().cumsum(dim=0) - 1  # (M,) the run's number
    none = log_q.new_zeros(begins.sum(), log_q.shape[1])  # (N,K)
    return none.index_add(0, run, log_q)  # (N,K)


def mixture_loss(log_q, mask):
    """-Σ_runs log(1/K Σ_z Π_{t in run} q_z,t(y_t)) / M: nats per hidden character.

    log_q (N,K). With K = 1 this is the mean cross-entropy of the hidden characters.
    """
    K = log_q.shape[1]
    log_mixture = log_q.logsumexp(dim=1) - math.log(K)  # (N,)
    return -log_mixture.sum() / mask.sum()


def generator_loss(generator, dataset, args, seed):
    """The mixture's loss on a batch of the text, whose size and masking `args` name."""
    tokens, mask = masked_batch(
        dataset, args.batch_size, args.block_size, seed, args.masking
    )  # (B,T) twice
    logits = generator(tokens.masked_fill(mask, dataset.mask_id))  # (B·K,T,V)
    return mixture_loss(run_log_likelihoods(logits, tokens, mask), mask)


def fill_once(logits, masked, mask, uniforms, z, temperature=1.0):
    """Fill each input from one value of the latent: logits (B·K,T,V), z (B,) -> (B,T)."""
    B = len(z)
    logits = logits.unflatten(0, (B, -1))[torch.arange(B), z]  # (B,T,V)
    completions, _ = sample_completions(logits, masked, mask, uniforms, temperature)  # (B,1,T)
    return completions[:, 0]


@torch.no_grad()
def wrong_fills(generator, dataset, tokens, mask, seed):
    """Fill the blanks in many wrong ways: (B,T) -> completions (B,T)."""
    rng = np.random.default_rng(seed)
    B, T = tokens.shape
    temperature = rng.choice(TEMPERATURES, size=(B, 1, 1), p=[0.15, 0.15, 0.15, 0.35, 0.1, 0.1])
    temperature = torch.from_numpy(temperature.astype(np.float32))  # (B,1,1)
    uniforms = torch.from_numpy(rng.random((B, 1, T), dtype=np.float32))  # (B,1,T)
    position = rng.integers(len(dataset.tokens), size=(B, T))
    unigram = torch.from_numpy(dataset.tokens[position]).long()  # (B,T)
    repeated = torch.from_numpy(rng.integers(dataset.mask_id, size=(B, 1))).expand(B, T)  # (B,T)
    kind = torch.from_numpy(rng.choice(4, p=[0.70, 0.10, 0.05, 0.15], size=B))  # (B,)

    masked = tokens.masked_fill(mask, dataset.mask_id)  # (B,T)
    logits = generator(masked)  # (B·K,T,V)
    z = torch.from_numpy(rng.integers(len(logits) // B, size=B))  # (B,)
    drawn = fill_once(logits, masked, mask, uniforms, z, temperature)  # (B,T)
    # fmt: off
    fills = torch.stack([drawn,     # 70 %: the generator's own draws
                         unigram,   # 10 %: characters of the text, blind to everything
                         repeated,  #  5 %: one character, repeated
                         tokens])   # 15 %: nothing wrong
    # fmt: on
    return torch.where(mask, fills[kind, torch.arange(B)], tokens)  # (B,T)


def words_by_length(dataset):
    """The different words of the text: {length: ((n,length) tokens, (n,) shares)}.

    Shares by the square root of how often a word occurs: by the frequency itself the judge would
    learn to doubt common words, by equal shares to doubt rare ones.
    """
    spaces = np.flatnonzero(np.isin(dataset.tokens, dataset.spaces))
    starts = spaces[:-1] + 1
    lengths = np.diff(spaces) - 1
    words = {}
    for length in np.unique(lengths[lengths > 0]):
        position = starts[lengths == length][:, None] + np.arange(length)
        found = dataset.tokens[position]  # (occurrences,length)
        different, counts = np.unique(found, axis=0, return_counts=True)
        weights = counts**0.5
        words[length] = different, weights / weights.sum()
    return words


def swap_words(dataset, words, tokens, seed, share=0.25):
    """Put another word of the same length in the place of a `share` of the words: (B,T) -> (B,T).

    Only a judge that reads the words around can tell. Without these it takes any common word for
    real, and GRPO fills `the` and `function` everywhere.
    """
    rng = np.random.default_rng(seed)
    completions = tokens.numpy().copy()  # (B,T)
    for row in completions:
        for start, end in whole_words(np.isin(row, dataset.spaces)):
            length = end - start
            if length in words and rng.random() < share:
                different, shares = words[length]
                row[start:end] = different[rng.choice(len(different), p=shares)]
    return torch.from_numpy(completions)


def by_word(flags, is_space):
    """Is any flag set in the word that a character stands in? (B,T) bool twice -> (B,T) bool.

    A space belongs to the word after it.
    """
    word = is_space.long().cumsum(dim=1)  # (B,T) number of the word
    flagged = torch.zeros_like(word).scatter_add_(1, word, flags.long())  # (B,T) by number
    return flagged.gather(1, word) > 0


def mean_over(x, where):
    """Mean of x over `where`; 0 if that is nowhere."""
    return x[where].sum() / where.sum().clamp(min=1)


def judge_loss(judge, generator, dataset, words, size, block_size, seed):
    """Mean binary cross-entropy, in nats a character, of "the word here is the original one".

    One label per word, not per character: a parallel fill is drawn blind to itself, so whether a
    single character is the original says little about its neighbours, whereas a word is right only
    if its characters agree. Half of the rows are fills of blanks, where the words that had blanks
    weigh 0.85; half have swapped words, where real and swapped weigh the same.
    """
    half = size // 2
    tokens, mask = masked_batch(dataset, half, block_size, seed)  # (B/2,T) twice
    fills = wrong_fills(generator, dataset, tokens, mask, (*seed, 2))  # (B/2,T)
    others, _ = dataset.batch(
        size - half, block_size, parse_masking(MASKING), 0.0, 1, (*seed, 7)
    )  # (B/2,T)
    swapped = swap_words(dataset, words, others, (*seed, 3))  # (B/2,T)

    completions = torch.cat([fills, swapped])  # (B,T)
    tokens = torch.cat([tokens, others])  # (B,T)
    is_space = torch.isin(tokens, torch.from_numpy(dataset.spaces))  # (B,T)
    real = ~by_word(completions != tokens, is_space)  # (B,T)
    logits = judge(completions).float()  # (B,T)
    losses = F.binary_cross_entropy_with_logits(logits, real.float(), reduction="none")  # (B,T)

    hidden = by_word(mask, is_space[:half])  # (B/2,T)
    of_fills = 0.85 * mean_over(losses[:half], hidden) + 0.15 * mean_over(losses[:half], ~hidden)
    real = real[half:]  # (B/2,T)
    of_swapped = 0.5 * mean_over(losses[half:], ~real) + 0.5 * mean_over(losses[half:], real)
    return 0.5 * of_fills + 0.5 * of_swapped


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


def in_batches(model, tokens):
    """The model's output for all inputs, 64 at a time, under a bar."""
    bar = tqdm(tokens.split(64), desc="report", leave=False, dynamic_ncols=True)
    return torch.cat([model(part) for part in bar])


def mean_score(logits, where, lenience=0.0):
    """The judge's mean P(real) over `where`: (B,T) -> (B,). e^lenience raises its odds."""
    p = (logits + lenience).sigmoid() * where  # (B,T)
    return p.sum(dim=1) / where.sum(dim=1)


def auc(real, fake):
    """Share of the pairs in which the original scores more than the fill, a tie being half.

    Scores (B,) and (B,): every original against its own fill, which is what GRPO learns from;
    (B,1) and (B,): against every fill.
    """
    ties = (real == fake).float()
    return ((real > fake).float() + 0.5 * ties).mean().item()


def prefers_original(real_logits, other_logits, changed):
    """Share of the inputs with another word in which the judge takes the original for more real."""
    real = mean_score(real_logits, changed)  # (B,)
    other = mean_score(other_logits, changed)  # (B,)
    return (real > other)[changed.any(dim=1)].float().mean().item()


def generator_figures(logits, tokens, mask):
    """Likelihood of the hidden characters, shares of the values of z, accuracy of the best guess.

    A value's share is its posterior probability, averaged over runs of blanks; the best guess is
    the argmax of the mixture's marginal.
    """
    log_q = run_log_likelihoods(logits, tokens, mask)  # (N,K)
    shares = log_q.softmax(dim=1).mean(dim=0)  # (K,)
    by_input = logits.unflatten(0, (len(tokens), -1))  # (B,K,T,V)
    marginal = by_input.softmax(dim=-1).mean(dim=1)  # (B,T,V)
    right = marginal.argmax(dim=-1) == tokens  # (B,T)
    return {
        "nats": mixture_loss(log_q, mask).item(),
        "least_z": shares.min().item(),
        "largest_z": shares.max().item(),
        "characters": right[mask].float().mean().item(),
        "whole_inputs": (right | ~mask).all(dim=1).float().mean().item(),
    }


def judge_figures(real, fake, mask):
    """How well the judge tells originals from fills, from its logits of both: (B,T) twice."""
    everywhere = torch.ones_like(mask)  # (B,T)
    figures = {}
    for name, where, lenience in (
        ("judge_auc", everywhere, 0.0),
        ("judge_auc_at_blanks", mask, 0.0),
        ("judge_auc_lenient", everywhere, 2 * DOUBT),
    ):
        of_real = mean_score(real, where, lenience)[:, None]  # (B,1)
        figures[name] = auc(of_real, mean_score(fake, where, lenience))
    figures["judge_auc_paired"] = auc(mean_score(real, everywhere), mean_score(fake, everywhere))
    return figures


TESTS = [  # name, masking, ratio, hidden words
    ("random 15%", "random", 0.15, 0),
    ("random 30%", "random", 0.30, 0),
    ("random and short runs 15%", "random:0.5,sticky:0.5", 0.15, 0),
    ("one word", "word", 0, 1),
    ("two words", "word", 0, 2),
    ("random and short runs 30%", "random:0.5,sticky:0.5", 0.30, 0),
]


@torch.no_grad()
def report(generator, judge, dataset, words, block_size, size=1024):
    """Print, on held-out text and by masking, how good the two models are.

    The judge's figures are against the generator's draws at temperature 1.
    """

    def show(name, figures):
        cells = [f"  {key} {value:.3f}" for key, value in figures.items()]
        print(f"{name:26s}" + "".join(cells), flush=True)

    for i, (name, masking, ratio, hidden) in enumerate(TESTS):
        masking = parse_masking(masking)
        tokens, mask = dataset.batch(size, block_size, masking, ratio, hidden, (7, i))  # (B,T)
        masked = tokens.masked_fill(mask, dataset.mask_id)  # (B,T)
        logits = in_batches(generator, masked)  # (B·K,T,V)
        figures = generator_figures(logits, tokens, mask)
        z = torch.arange(size) % (len(logits) // size)  # (B,)
        rng = torch.Generator().manual_seed(i)
        uniforms = torch.rand(size, 1, block_size, generator=rng)  # (B,1,T)
        fills = fill_once(logits, masked, mask, uniforms, z)  # (B,T)
        real = in_batches(judge, tokens)  # (B,T)
        fake = in_batches(judge, fills)  # (B,T)
        show(name, figures | judge_figures(real, fake, mask))
    tokens, _ = dataset.batch(size, block_size, parse_masking(MASKING), 0.0, 1, (7, 4))  # (B,T)
    others = swap_words(dataset, words, tokens, (7, 9), share=0.1)  # (B,T)
    real = in_batches(judge, tokens)  # (B,T)
    fake = in_batches(judge, others)  # (B,T)
    share = prefers_original(real, fake, others != tokens)
    show("another word in its place", {"judge_prefers_original": share})


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
