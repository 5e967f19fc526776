"""Train the two models that GRPO starts from: the generator (fill the blanks), then the judge (was it filled?).

    python -m model.pretrain --out_dir=out-pretrain            # both; with --dtype=bfloat16 over an hour on 2 CPU cores
    python -m model.pretrain --out_dir=out-pretrain --resume   # go on where it was stopped

The generator learns masked characters (1810.04805) under every masking that GRPO may use, partly revealed ones included,
since filling blank by blank passes through those. The judge starts as a copy of it and learns, for every character, whether its
word is the original one (after ELECTRA's replaced-token detection, 2003.10555). Whatever the judge was never shown, GRPO finds; so it
sees originals, the generator's own one-step fills at several temperatures, plainly wrong fills, and true words in the wrong place.

Letters: B inputs, T characters, V vocabulary. Losses and report take the models as functions of tokens on the CPU, wherever the weights live.
"""

import argparse
import math
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
from grpo.sampling import sample_completions
from model.transformer import Generator, Judge, TransformerConfig

MASKING = parse_masking("word:0.5,random:0.25,span:0.1,sticky:0.15")
SAVE_INTERVAL = 500
# Training showed the judge about as many real words as wrong ones. Of what a policy draws most is wrong: the prior odds of "real" are lowered by this
# factor e^-DOUBT (Bayes' rule, in the logit). Else a common word in the wrong place scores most of what the right one does.
DOUBT = 3.0
TEMPERATURES = [0.1, 0.4, 0.7, 1.0, 1.25, 1.5]  # of the generator's fills for the judge


def masked_batch(dataset, size, block_size, seed):
    """Inputs at every difficulty: tokens (B,T), mask (B,T). In four rows of ten, part of the blanks is revealed again."""
    rng = np.random.default_rng((*seed, 1))
    tokens, mask = dataset.batch(
        size, block_size, MASKING, rng.uniform(0.1, 0.6, size), rng.integers(1, 6, size), (*seed, 0)
    )
    hide = np.where(rng.random(size) < 0.6, 1.0, rng.random(size))  # (B,) share that stays hidden
    return tokens, mask & torch.from_numpy(rng.random(mask.shape) < hide[:, None])


def run_log_likelihoods(logits, tokens, mask):
    """log q_z(y) = Σ_{t in run} log q_z,t(y_t) of each run of adjacent blanks, in nats.

    logits (B·K,T,V), tokens (B,T), mask (B,T) bool -> (R,K), the R runs of all inputs in order
    """
    B, T = mask.shape
    logits = logits.unflatten(0, (B, -1)).transpose(1, 2)  # (B,T,K,V)
    log_q = logits[mask].float().log_softmax(dim=-1)  # (N,K,V) of the N blanks
    hidden = tokens[mask][:, None, None].expand(-1, log_q.shape[1], 1)  # (N,K,1)
    log_q = log_q.gather(-1, hidden).squeeze(-1)  # (N,K)
    before = F.pad(mask, (1, 0))[:, :-1]  # (B,T) is there a blank just before?
    begins = (mask & ~before)[mask]  # (N,) does a run begin here?
    run = begins.long().cumsum(dim=0) - 1  # (N,) the run's number
    return log_q.new_zeros(begins.sum(), log_q.shape[1]).index_add(0, run, log_q)  # (R,K)


def generator_loss(generator, dataset, size, block_size, seed):
    """-Σ_runs log(1/K Σ_z Π_{t in run} q_z,t(y_t)) / number of blanks: the mixture's cross-entropy,
    in nats per hidden character. With K = 1 a run is the product of its characters."""
    tokens, mask = masked_batch(dataset, size, block_size, seed)  # (B,T), (B,T)
    logits = generator(tokens.masked_fill(mask, dataset.mask_id))  # (B·K,T,V)
    log_q = run_log_likelihoods(logits, tokens, mask)  # (R,K)
    log_mixture = log_q.logsumexp(dim=1) - math.log(log_q.shape[1])  # (R,)
    return -log_mixture.sum() / mask.sum()


@torch.no_grad()
def wrong_fills(generator, dataset, tokens, mask, seed):
    """Fill the blanks in many wrong ways: (B,T) -> completions (B,T). Of 20 rows 14 are the generator's parallel draws at temperature 0.1 (all but
    argmax) to 1.5, 2 are drawn from the characters of the text, blind to everything, 1 is one repeated character, and 3 stay the original."""
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
    logits = generator(masked).unflatten(0, (B, -1))  # (B,K,T,V)
    z = torch.from_numpy(rng.integers(logits.shape[1], size=B))  # (B,) each input's latent
    logits = logits[torch.arange(B), z]  # (B,T,V)
    completions, _ = sample_completions(logits, masked, mask, uniforms, temperature)  # (B,1,T)
    # fmt: off
    fills = torch.stack([completions[:, 0],  # 70 %: the generator's own draws
                         unigram,            # 10 %: characters of the text, blind to everything
                         repeated,           #  5 %: one character, repeated
                         tokens])            # 15 %: nothing wrong
    # fmt: on
    return torch.where(mask, fills[kind, torch.arange(B)], tokens)  # (B,T)


def words_by_length(dataset):
    """The different words of the text: {length: ((n,length) tokens, (n,) shares)}, shares by the square root of how often a word occurs: by the
    frequency itself the judge would learn to doubt common words, by equal shares to doubt rare ones."""
    spaces = np.flatnonzero(np.isin(dataset.tokens, dataset.spaces))
    starts, lengths, words = spaces[:-1] + 1, np.diff(spaces) - 1, {}
    for length in np.unique(lengths[lengths > 0]):
        different, counts = np.unique(
            dataset.tokens[starts[lengths == length][:, None] + np.arange(length)],
            axis=0,
            return_counts=True,
        )
        words[length] = different, counts**0.5 / (counts**0.5).sum()
    return words


def swap_words(dataset, words, tokens, seed, share=0.25):
    """Put another word of the same length in the place of a `share` of the words: (B,T) -> completions (B,T). Only a judge that reads the words
    around can tell. Without these it takes any common word for real, and GRPO fills `the` and `function` everywhere."""
    rng = np.random.default_rng(seed)
    completions = tokens.numpy().copy()  # (B,T)
    for row in completions:
        for start, end in whole_words(np.isin(row, dataset.spaces)):
            if end - start in words and rng.random() < share:
                different, shares = words[end - start]
                row[start:end] = different[rng.choice(len(different), p=shares)]
    return torch.from_numpy(completions)


def by_word(flags, is_space):
    """Is any flag set in the word that a character stands in? A space belongs to the word after it. (B,T) bool twice -> (B,T) bool."""
    word = is_space.long().cumsum(dim=1)  # (B,T) number of the word
    return torch.zeros_like(word).scatter_add_(1, word, flags.long()).gather(1, word) > 0


def judge_loss(judge, generator, dataset, words, size, block_size, seed):
    """Mean binary cross-entropy, in nats a character, of "the word that this character stands in is the original one".
    One label per word, not per character: a parallel fill is drawn blind to itself, so whether a single character is the original says little about its
    neighbours, whereas a word is right only if its characters agree. Half of the rows are fills of blanks, where the words that had blanks weigh 0.85; half
    have swapped words, where real and swapped weigh the same."""
    tokens, mask = masked_batch(dataset, size // 2, block_size, seed)
    others, _ = dataset.batch(size - size // 2, block_size, MASKING, 0.0, 1, (*seed, 7))
    completions = torch.cat(
        [
            wrong_fills(generator, dataset, tokens, mask, (*seed, 2)),
            swap_words(dataset, words, others, (*seed, 3)),
        ]
    )  # (B,T)
    tokens = torch.cat([tokens, others])  # (B,T)
    is_space = torch.isin(tokens, torch.from_numpy(dataset.spaces))  # (B,T)
    real = ~by_word(completions != tokens, is_space)  # (B,T)
    losses = F.binary_cross_entropy_with_logits(
        judge(completions).float(), real.float(), reduction="none"
    )
    filled, swapped = losses.split((size // 2, size - size // 2))
    hidden, fake = by_word(mask, is_space[: size // 2]), ~real[size // 2 :]
    mean = lambda x: x.sum() / max(1, x.numel())
    return 0.5 * (0.85 * mean(filled[hidden]) + 0.15 * mean(filled[~hidden])) + 0.25 * (
        mean(swapped[fake]) + mean(swapped[~fake])
    )


def make_optimizers(model, learning_rate):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.trunk.blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return (
        torch.optim.Muon(
            matrices,
            lr=learning_rate,
            weight_decay=0.05,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=learning_rate / 4, betas=(0.9, 0.98), weight_decay=0.05),
    )


def fit(name, model, loss_fn, steps, learning_rate, args):
    """Minimise `loss_fn(step)`: warm-up, then a cosine to zero. Saved every SAVE_INTERVAL steps, goes on with --resume."""
    state_file, start, average = Path(args.out_dir) / f"{name}_state.pt", 0, 0.0
    recipe = {
        key: value
        for key, value in vars(args).items()
        if key not in ("resume", "out_dir", "device")
    }
    parts = model, *optimizers = model, *make_optimizers(model, learning_rate)
    if args.resume and state_file.exists():
        state = read(state_file)
        if state.get("recipe") != recipe:
            raise ValueError(
                f"--resume: {state_file} was made with {state.get('recipe')}, now asked for {recipe}; repeat its arguments, or name a new --out_dir"
            )
        start = state["step"]
        for part, saved in zip(parts, state["parts"]):
            part.load_state_dict(saved)
    schedule = lambda step: min(
        (step + 1) / min(200, 1 + steps // 5), 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, schedule, last_epoch=start - 1)
        for optimizer in optimizers
    ]
    bar = tqdm(
        range(start, steps),
        initial=start,
        total=steps,
        desc=name,
        dynamic_ncols=True,
        mininterval=1,
    )
    for step in bar:
        loss = loss_fn(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *schedulers):
            each.step()
        model.zero_grad()
        average += (loss.item() - average) / min(step - start + 1, 100)
        bar.set_postfix(loss=f"{average:.4f}", refresh=False)
        if (step + 1) % SAVE_INTERVAL == 0 or step + 1 == steps:
            write(
                state_file,
                {
                    "parts": [part.state_dict() for part in parts],
                    "step": step + 1,
                    "recipe": recipe,
                },
            )


def mean_scores(judge, tokens, completions, where, lenience=0.0):
    """The judge's mean P(real) over `where` of the originals and of their completions, with the odds of "real" raised by e^lenience: (B,T) each -> (B,) twice."""
    return (
        ((judge(rows) + lenience).sigmoid() * where).sum(dim=1) / where.sum(dim=1)
        for rows in (tokens, completions)
    )


def auc(judge, tokens, fills, where, paired=False, lenience=0.0):
    """Share of (original, fill) pairs in which the judge prefers the original, a tie being half: every original against every fill, or, paired, against
    its own. GRPO compares fills of one input with each other, so what it learns from is the paired one."""
    real, fake = mean_scores(judge, tokens, fills, where, lenience)
    real = real if paired else real[:, None]
    return ((real > fake).float() + 0.5 * (real == fake).float()).mean().item()


def prefers_original(judge, tokens, completions):
    """Share of the inputs with another word in them in which the judge takes the original word for real more than the other one."""
    changed = completions != tokens  # (B,T)
    real, other = mean_scores(judge, tokens, completions, changed)
    return (real > other)[changed.any(dim=1)].float().mean().item()


@torch.no_grad()
def report(generator, judge, dataset, words, block_size, size=1024):
    """Print the held-out accuracy of the generator's best guess, and the judge's AUC against its draws at temperature 1, by masking."""

    def show(name, **figures):
        print(f"{name:26s}" + "".join(f"  {key} {value:.3f}" for key, value in figures.items()))

    tests = [
        ("random 15%", "random", 0.15, 0),
        ("random 30%", "random", 0.30, 0),
        ("random and short runs 15%", "random:0.5,sticky:0.5", 0.15, 0),
        ("one word", "word", 0, 1),
        ("two words", "word", 0, 2),
        ("random and short runs 30%", "random:0.5,sticky:0.5", 0.30, 0),
    ]
    for i, (name, masking, ratio, hidden) in enumerate(tests):
        tokens, mask = dataset.batch(
            size, block_size, parse_masking(masking), ratio, hidden, (7, i)
        )
        masked = tokens.masked_fill(mask, dataset.mask_id)
        logits = generator(masked)  # (B·K,T,V)
        log_q = run_log_likelihoods(logits, tokens, mask)  # (R,K)
        log_mixture = log_q.logsumexp(dim=1) - math.log(log_q.shape[1])  # (R,)
        shares = log_q.softmax(dim=1).mean(dim=0)  # (K,) how often z explains a run best
        marginal = logits.unflatten(0, (size, -1)).softmax(dim=-1).mean(dim=1)  # (B,T,V)
        z = torch.arange(size) % log_q.shape[1]  # (B,)
        logits = logits.unflatten(0, (size, -1))[torch.arange(size), z]  # (B,T,V)
        uniforms = torch.rand(size, 1, block_size, generator=torch.Generator().manual_seed(i))
        right, everywhere = (marginal.argmax(-1) == tokens) | ~mask, torch.ones_like(mask)  # (B,T)
        fills = sample_completions(logits, masked, mask, uniforms)[0][:, 0]  # (B,T)
        show(
            name,
            nats=-log_mixture.sum().item() / mask.sum().item(),
            least_z=shares.min().item(),
            largest_z=shares.max().item(),
            characters=1 - (~right).sum().item() / mask.sum().item(),
            whole_inputs=right.all(dim=1).float().mean().item(),
            judge_auc=auc(judge, tokens, fills, everywhere),
            judge_auc_at_blanks=auc(judge, tokens, fills, mask),
            judge_auc_paired=auc(judge, tokens, fills, everywhere, paired=True),
            judge_auc_lenient=auc(judge, tokens, fills, everywhere, lenience=2 * DOUBT),
        )
    tokens, _ = dataset.batch(size, block_size, MASKING, 0.0, 1, (7, 4))
    show(
        "another word in its place",
        judge_prefers_original=prefers_original(
            judge, tokens, swap_words(dataset, words, tokens, (7, 9), share=0.1)
        ),
    )


def begin_from(path, generator, vocabulary):
    """Take over the weights of a generator's file. Where `generator` has more values of the latent
    than the file, its head becomes copies of the file's, and noise that makes them differ."""
    saved = load_model(path, "generator", vocabulary)
    have, want = saved.trunk.config, generator.trunk.config
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
    size, words = (args.batch_size, args.block_size), words_by_length(train)
    torch.manual_seed(args.seed)
    config = TransformerConfig(
        vocab_size=len(train.vocabulary),
        block_size=args.block_size,
        n_layer=args.n_layer,
        n_head=args.n_embd // 32,
        n_embd=args.n_embd,
        n_latent=args.n_latent,
    )
    generator = Generator(config)
    if args.start:
        begin_from(args.start, generator, train.vocabulary)
    models = generator, judge = (
        generator.to(device),
        Judge(replace(config, n_layer=args.judge_layers or args.n_layer, n_latent=1)).to(device),
    )
    generate, score = (
        forward(model, device, Config(dtype=args.dtype, compile="false")) for model in models
    )
    fit(
        "generator",
        generator,
        lambda step: generator_loss(generate, train, *size, (args.seed, 0, step)),
        args.generator_steps,
        2e-3 if args.start else 8e-3,
        args,
    )
    write(
        Path(args.out_dir) / "generator.pt", model_file(generator, train.vocabulary, torch.float16)
    )
    judge.trunk.load_state_dict(generator.trunk.state_dict(), strict=False)  # its first layers
    fit(
        "judge",
        judge,
        lambda step: judge_loss(score, generate, train, words, *size, (args.seed, 1, step)),
        args.judge_steps,
        4e-3,
        args,
    )
    with torch.no_grad():
        judge.head.bias -= DOUBT
    write(Path(args.out_dir) / "judge.pt", model_file(judge, train.vocabulary, torch.float16))
    report(
        *(forward(model, device, Config(compile="false")) for model in models),
        val,
        words,
        args.block_size,
    )


NUMBERS = {  # default, least value, about
    "generator_steps": (11000, 1, "steps"),
    "judge_steps": (2400, 1, "steps"),
    "batch_size": (64, 2, "inputs per step"),
    "block_size": (64, 5, "characters per input"),
    "n_layer": (6, 1, "layers of the generator"),
    "judge_layers": (0, 0, "layers of the judge, 0: as many, at most n_layer"),
    "n_embd": (128, 32, "width, a multiple of 32"),
    "n_latent": (1, 1, "values of the latent that all blanks of a completion see"),
    "seed": (1, 0, "of weights, inputs and draws"),
}


def main(argv=None):
    parser = Parser(
        description="Train the generator, then the judge, from random weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--dataset", default="char_diffusion", help="folder under data/, made by prepare.py"
    )
    parser.add_argument(
        "--out_dir", default="out-pretrain", help="generator.pt and judge.pt are written here"
    )
    parser.add_argument(
        "--start", default="", help="a generator's file to begin from; none: random weights"
    )
    for name, (default, _, about) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=about)
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="bfloat16: a step in two thirds of the time, on a CPU that multiplies it",
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda, cuda:1, ...; auto: cuda where there is one",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from what the same command saved in out_dir"
    )
    with exit_on_mistake("pretrain"):
        args = parser.parse_args(argv)
        for name, (_, least, about) in NUMBERS.items():
            if getattr(args, name) < least or name == "n_embd" and args.n_embd % 32:
                raise ValueError(
                    f"--{name}={getattr(args, name)} is not allowed; {name} ({about}) takes a whole number of {least} or more"
                )
        if args.resume and not (state_file := Path(args.out_dir) / "generator_state.pt").exists():
            raise ValueError(
                f"--resume goes on from {state_file}, and there is none; leave --resume out to begin"
            )
        if args.judge_layers > args.n_layer:
            raise ValueError(
                f"--judge_layers={args.judge_layers} is more than --n_layer={args.n_layer}; the judge starts from the generator's first layers: name as many or fewer"
            )
        device, splits = pick_device(args.device), load_data(args.dataset, args.block_size)
        Path(args.out_dir).mkdir(
            parents=True, exist_ok=True
        )  # a folder that cannot be is noticed now, not after an hour
        pretrain(args, device, *splits)


if __name__ == "__main__":
    main()
