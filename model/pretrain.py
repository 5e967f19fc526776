"""
Train the two models that GRPO starts from: the generator (fill the blanks), then the judge (was it filled?).

    python -m model.pretrain --out_dir=out-pretrain            # both; with --dtype=bfloat16 over an hour on 2 CPU cores
    python -m model.pretrain --out_dir=out-pretrain --resume   # go on where it was stopped

The generator learns masked characters (1810.04805) under every masking that GRPO may use, partly revealed ones included,
since filling blank by blank passes through those. The judge starts as a copy of it and learns, for every character, whether its
word is the original one (after ELECTRA's replaced-token detection, 2003.10555). Whatever the judge was never shown, GRPO finds; so it
sees originals, the generator's own one-step fills at several temperatures, plainly wrong fills, and true words in the wrong place.
"""
import argparse
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.masking import parse_masking
from grpo.checkpoint import model_file, read, write
from grpo.config import Parser, exit_on_mistake
from grpo.sampling import draw, integer_weights
from grpo.setup import load_data
from model.transformer import Generator, Judge, TransformerConfig

MASKING = parse_masking("word:0.5,random:0.25,span:0.1,sticky:0.15")
SAVE_INTERVAL = 500
# Training showed the judge about as many real words as wrong ones. Of what a policy draws most is wrong: the prior odds of "real" are lowered by this
# factor e^-DOUBT (Bayes' rule, in the logit). Else a common word in the wrong place scores most of what the right one does.
DOUBT = 3.0


def masked_batch(dataset, size, block_size, seed):
    """Inputs at every difficulty: tokens (B,T), mask (B,T). In four rows of ten, part of the blanks is revealed again."""
    rng = np.random.default_rng((*seed, 1))
    tokens, mask = dataset.batch(size, block_size, MASKING, rng.uniform(0.1, 0.6, size), rng.integers(1, 6, size), (*seed, 0))
    hide = np.where(rng.random(size) < 0.6, 1.0, rng.random(size))                        # (B,) share that stays hidden
    return tokens, mask & torch.from_numpy(rng.random(mask.shape) < hide[:, None])


def generator_loss(generator, dataset, size, block_size, seed):
    """Mean cross-entropy of the hidden characters, in nats."""
    tokens, mask = masked_batch(dataset, size, block_size, seed)
    logits = generator(tokens.masked_fill(mask, dataset.mask_id))                         # (B,T,V)
    return F.cross_entropy(logits.float()[mask], tokens[mask])


@torch.no_grad()
def wrong_fills(generator, dataset, tokens, mask, seed):
    """Fill the blanks in many wrong ways, row by row at random: (B,T) -> completions (B,T).

    Of 20 rows 14 are the generator's parallel draws at temperature 0.1 to 1.5 (0.1 is all but argmax), 2 are drawn from the characters
    of the text, blind to everything, 1 is one repeated character, and 3 stay the original.
    """
    rng = np.random.default_rng(seed)
    B, T = tokens.shape
    temperature = torch.from_numpy(rng.choice([0.1, 0.4, 0.7, 1.0, 1.25, 1.5], size=(B, 1, 1), p=[0.15, 0.15, 0.15, 0.35, 0.1, 0.1]).astype(np.float32))
    weights = integer_weights(generator(tokens.masked_fill(mask, dataset.mask_id)), temperature)  # (B,T,V)
    uniforms = torch.from_numpy(rng.random((B, T, 1), dtype=np.float32))                  # (B,T,1)
    fills = draw(weights, uniforms).squeeze(-1)                                           # (B,T)
    unigram = torch.from_numpy(dataset.tokens[rng.integers(len(dataset.tokens), size=(B, T))].astype(np.int64))
    repeated = torch.from_numpy(rng.integers(dataset.mask_id, size=(B, 1))).expand(B, T)
    kind = torch.from_numpy(rng.choice(4, size=(B, 1), p=[0.7, 0.1, 0.05, 0.15]))         # (B,1)
    fills = torch.where(kind == 0, fills, torch.where(kind == 1, unigram, torch.where(kind == 2, repeated, tokens)))
    return torch.where(mask, fills, tokens)


def words_by_length(dataset):
    """The different words of the text: {length: ((n,length) tokens, (n,) shares)}; the share goes with the square root of how often a word occurs.

    Were it the frequency itself, the judge would learn to doubt common words; were it equal for all, to doubt rare ones.
    """
    spaces = np.flatnonzero(np.isin(dataset.tokens, dataset.spaces))
    lengths, words = np.diff(spaces) - 1, {}
    for length in np.unique(lengths[lengths > 0]):
        different, counts = np.unique(dataset.tokens[spaces[:-1][lengths == length][:, None] + 1 + np.arange(length)], axis=0, return_counts=True)
        words[length] = different, counts**0.5 / (counts**0.5).sum()
    return words


def swap_words(dataset, words, tokens, seed, share=0.25):
    """Put another word of the same length in the place of a `share` of the words: (B,T) -> completions (B,T).

    Spelling gives these away nowhere: only a judge that reads the words around can tell. Without them it takes any common word for
    real, and GRPO fills `the` and `function` everywhere.
    """
    rng = np.random.default_rng(seed)
    completions = tokens.numpy().copy()                                                   # (B,T)
    for row, is_space in zip(completions, np.isin(completions, dataset.spaces)):
        spaces = np.flatnonzero(is_space)
        whole = [(a + 1, b) for a, b in zip(spaces[:-1], spaces[1:]) if b - a > 1 and b - a - 1 in words]
        for start, end in (span for span in whole if rng.random() < share):
            different, shares = words[end - start]
            row[start:end] = different[rng.choice(len(different), p=shares)]
    return torch.from_numpy(completions)


def by_word(flags, is_space):
    """Is any flag set in the word that a character stands in? A space belongs to the word after it. (B,T) bool twice -> (B,T) bool."""
    word = is_space.long().cumsum(dim=1)                                                  # (B,T) number of the word
    return torch.zeros_like(word).scatter_add_(1, word, flags.long()).gather(1, word) > 0


def judge_loss(judge, generator, dataset, words, size, block_size, seed):
    """Mean binary cross-entropy, in nats a character, of "the word that this character stands in is the original one".

    One label per word, not per character: a parallel fill is drawn blind to itself, so whether a single character is the original
    says little about its neighbours, whereas a word is right only if its characters agree. Half of the rows are fills of blanks, where the
    words that had blanks weigh 0.85; half have swapped words, where real and swapped weigh the same.
    """
    tokens, mask = masked_batch(dataset, size // 2, block_size, seed)
    others, _ = dataset.batch(size - size // 2, block_size, MASKING, 0.0, 1, (*seed, 7))
    completions = torch.cat([wrong_fills(generator, dataset, tokens, mask, (*seed, 2)), swap_words(dataset, words, others, (*seed, 3))])  # (B,T)
    tokens = torch.cat([tokens, others])                                                  # (B,T)
    is_space = torch.isin(tokens, torch.from_numpy(dataset.spaces))                       # (B,T)
    real = ~by_word(completions != tokens, is_space)                                      # (B,T)
    losses = F.binary_cross_entropy_with_logits(judge(completions).float(), real.float(), reduction="none")
    filled, swapped = losses.split((size // 2, size - size // 2))
    hidden, fake = by_word(mask, is_space[: size // 2]), ~real[size // 2:]
    mean = lambda x: x.sum() / max(1, x.numel())
    return 0.5 * (0.85 * mean(filled[hidden]) + 0.15 * mean(filled[~hidden])) + 0.25 * (mean(swapped[fake]) + mean(swapped[~fake]))


def make_optimizers(model, learning_rate):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.trunk.blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return (torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=learning_rate / 4, betas=(0.9, 0.98), weight_decay=0.05))


def fit(name, model, loss_fn, steps, learning_rate, out_dir, args):
    """Warm-up, cosine to zero; `loss_fn(step)` is a step's loss. Saved every SAVE_INTERVAL steps, goes on with --resume."""
    state_file = Path(out_dir) / f"{name}_state.pt"
    recipe = {key: value for key, value in vars(args).items() if key not in ("resume", "out_dir")}
    optimizers = make_optimizers(model, learning_rate)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    start, average = 0, None
    if args.resume and state_file.exists():
        state = read(state_file)
        if state.get("recipe") != recipe:
            raise ValueError(f"--resume: {state_file} was made with {state.get('recipe')}, now asked for {recipe}; repeat its arguments, or name a new --out_dir")
        model.load_state_dict(state["weights"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        start = state["step"]
    with tqdm(range(start, steps), initial=start, total=steps, desc=name, dynamic_ncols=True, mininterval=1) as bar:
        for step in bar:
            schedule = min((step + 1) / min(200, 1 + steps // 5), 0.5 * (1 + math.cos(math.pi * step / steps)))
            for optimizer, peak in zip(optimizers, peaks):
                optimizer.param_groups[0]["lr"] = peak * schedule
            loss = loss_fn(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            average = loss.item() if average is None else 0.99 * average + 0.01 * loss.item()
            bar.set_postfix(loss=f"{average:.4f}", refresh=False)
            if (step + 1) % SAVE_INTERVAL == 0 or step + 1 == steps:
                write(state_file, {"weights": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step + 1, "recipe": recipe})
    return model.eval()


@torch.no_grad()
def auc(judge, text, fills, where):
    """Share of (original, fill) pairs, every original against every fill, in which the judge prefers the original, by its mean over `where` (B,T)."""
    real, fake = ((judge(rows).sigmoid() * where).sum(dim=1, keepdim=True) / where.sum(dim=1, keepdim=True) for rows in (text, fills))  # (B,1)
    return ((real > fake.T).float() + 0.5 * (real == fake.T).float()).mean().item()


@torch.no_grad()
def prefers_original(judge, tokens, completions):
    """Share of the inputs with another word in them in which the judge takes the original word for real more than the other one."""
    changed = completions != tokens                                                       # (B,T)
    real, other = ((judge(rows).sigmoid() * changed).sum(dim=1) for rows in (tokens, completions))
    return (real > other)[changed.any(dim=1)].float().mean().item()


@torch.no_grad()
def report(generator, judge, dataset, words, size=1024):
    """Held-out accuracy of the generator's best guess, and the judge's AUC against its draws at temperature 1, by masking."""
    block_size = generator.trunk.config.block_size
    tests = {"random 15%": ("random", 0.15, 0), "random 30%": ("random", 0.30, 0), "random and short runs 15%": ("random:0.5,sticky:0.5", 0.15, 0),
             "one word": ("word", 0, 1), "two words": ("word", 0, 2)}
    figures = {}
    for i, (name, (masking, ratio, hidden)) in enumerate(tests.items()):
        tokens, mask = dataset.batch(size, block_size, parse_masking(masking), ratio, hidden, (7, i))
        logits = generator(tokens.masked_fill(mask, dataset.mask_id))                     # (B,T,V)
        right = (logits.argmax(-1) == tokens) | ~mask                                     # (B,T)
        figures[name] = {"characters": 1 - (~right).sum().item() / mask.sum().item(), "whole_inputs": right.all(dim=1).float().mean().item()}
        uniforms = torch.rand(*tokens.shape, 1, generator=torch.Generator().manual_seed(i))
        fills = torch.where(mask, draw(integer_weights(logits, 1.0), uniforms).squeeze(-1), tokens)
        figures[name] |= {"judge_auc": auc(judge, tokens, fills, torch.ones_like(mask)), "judge_auc_at_blanks": auc(judge, tokens, fills, mask)}
    figures["another word in its place"] = {"judge_prefers_original": prefers_original(judge, tokens, swap_words(dataset, words, tokens, (7, 9), share=0.1))}
    return figures


def main(argv=None):
    parser = Parser(description="Train the generator, then the judge, from random weights.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", default="char_diffusion", help="folder under data/, made by prepare.py")
    parser.add_argument("--out_dir", default="out-pretrain", help="generator.pt and judge.pt are written here")
    parser.add_argument("--generator_steps", type=int, default=11000)
    parser.add_argument("--judge_steps", type=int, default=2400)
    parser.add_argument("--batch_size", type=int, default=64, help="inputs per step")
    parser.add_argument("--block_size", type=int, default=64, help="characters per input")
    parser.add_argument("--n_layer", type=int, default=6, help="layers of the generator")
    parser.add_argument("--judge_layers", type=int, default=6, help="layers of the judge, the generator's first ones; at most n_layer")
    parser.add_argument("--n_embd", type=int, default=128, help="width, a multiple of 32")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="bfloat16: a step in two thirds of the time, on a CPU that multiplies it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from what the same command saved in out_dir")
    with exit_on_mistake("pretrain"):
        args = parser.parse_args(argv)
        if not 1 <= args.judge_layers <= args.n_layer or args.n_embd < 32 or args.n_embd % 32:
            raise ValueError(f"--judge_layers={args.judge_layers} --n_layer={args.n_layer} --n_embd={args.n_embd}: the judge takes 1 to n_layer layers, n_embd a multiple of 32")
        if args.batch_size < 2 or args.seed < 0 or min(args.generator_steps, args.judge_steps) < 1:
            raise ValueError(f"--batch_size={args.batch_size} --generator_steps={args.generator_steps} --judge_steps={args.judge_steps} --seed={args.seed}: "
                             "batch_size takes 2 or more, the steps 1 or more, seed 0 or more")
        if args.resume and not (state_file := Path(args.out_dir) / "generator_state.pt").exists():
            raise ValueError(f"--resume goes on from {state_file}, and there is none; leave --resume out to begin")
        train, val = load_data(args.dataset, args.block_size)
        Path(args.out_dir).mkdir(parents=True, exist_ok=True)  # a folder that cannot be is noticed now, not after an hour
        pretrain(args, train, val)


def pretrain(args, train, val):
    """Both models, one after the other; each is written, in float16, as soon as it is done."""
    torch.manual_seed(args.seed)
    config = TransformerConfig(len(train.vocabulary), args.block_size, args.n_layer, args.n_embd // 32, args.n_embd)
    generator, words = Generator(config), words_by_length(train)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if args.dtype == "bfloat16" else nullcontext()

    def generator_step(step):
        with autocast:
            return generator_loss(generator, train, args.batch_size, args.block_size, (args.seed, 0, step))

    fit("generator", generator, generator_step, args.generator_steps, 8e-3, args.out_dir, args)
    write(Path(args.out_dir) / "generator.pt", model_file(generator, train.vocabulary, torch.float16))
    judge = Judge(replace(config, n_layer=args.judge_layers))
    first_layers = generator.trunk.state_dict()
    judge.trunk.load_state_dict({name: first_layers[name] for name in judge.trunk.state_dict()})

    def judge_step(step):
        with autocast:
            return judge_loss(judge, generator, train, words, args.batch_size, args.block_size, (args.seed, 1, step))

    fit("judge", judge, judge_step, args.judge_steps, 4e-3, args.out_dir, args)
    with torch.no_grad():
        judge.head.bias -= DOUBT
    write(Path(args.out_dir) / "judge.pt", model_file(judge, train.vocabulary, torch.float16))
    for name, row in report(generator, judge, val, words).items():
        print(f"{name:26s}" + "".join(f"  {key} {value:.3f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
