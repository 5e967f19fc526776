"""
Train the two models that GRPO starts from: the generator (fill the blanks), then the judge (was it filled?).

    python -m model.pretrain --out_dir=out-pretrain            # both, about an hour on 2 CPU cores
    python -m model.pretrain --out_dir=out-pretrain --resume   # go on where it was stopped

The generator learns masked characters (1810.04805) under every masking that GRPO may use, partly revealed ones included,
since filling blank by blank passes through those. The judge starts from the generator's first layers and learns, for every
character, whether its word is the original one (after ELECTRA's replaced-token detection, 2003.10555): on originals, on the
generator's own one-step fills at several temperatures, and on plainly wrong fills. Whatever the judge was never shown,
GRPO finds.
"""
import argparse
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.masking import parse_masking
from grpo.checkpoint import model_file, read, write
from grpo.config import exit_on_mistake
from grpo.sampling import draw, integer_weights
from grpo.setup import load_data
from model.transformer import Generator, Judge, TransformerConfig

MASKING = parse_masking("word:0.4,random:0.3,span:0.15,sticky:0.15")
SAVE_INTERVAL = 500


def masked_batch(dataset, size, block_size, seed):
    """Inputs at every difficulty: tokens (B,T), mask (B,T). In half of the rows, part of the blanks is revealed again."""
    rng = np.random.default_rng((*seed, 1))
    tokens, mask = dataset.batch(size, block_size, MASKING, rng.uniform(0.03, 0.5, size), rng.integers(1, 4, size), (*seed, 0))
    hide = np.where(rng.random(size) < 0.5, 1.0, rng.random(size))                        # (B,) share that stays hidden
    return tokens, mask & torch.from_numpy(rng.random(mask.shape) < hide[:, None])


def generator_loss(generator, dataset, size, block_size, seed):
    """Mean cross-entropy of the hidden characters, in nats."""
    tokens, mask = masked_batch(dataset, size, block_size, seed)
    logits = generator(tokens.masked_fill(mask, dataset.mask_id))                         # (B,T,V)
    return F.cross_entropy(logits[mask], tokens[mask])


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


def by_word(flags, is_space):
    """Is any flag set in the word that a character stands in? A space belongs to the word after it. (B,T) bool twice -> (B,T) bool."""
    word = is_space.long().cumsum(dim=1)                                                  # (B,T) number of the word
    return torch.zeros_like(word).scatter_add_(1, word, flags.long()).gather(1, word) > 0


def judge_loss(judge, generator, dataset, size, block_size, seed):
    """Mean binary cross-entropy, in nats a character, of "the word that this character stands in is the original one".

    One label per word, not per character: a parallel fill is drawn blind to itself, so whether a single character is the original
    says little about its neighbours, whereas a word is right only if its characters agree. Words that had blanks weigh 0.85, the
    many that had none 0.15: what is asked of the judge is to tell fills apart.
    """
    tokens, mask = masked_batch(dataset, size, block_size, seed)
    completions = wrong_fills(generator, dataset, tokens, mask, (*seed, 2))               # (B,T)
    is_space = torch.isin(tokens, torch.from_numpy(dataset.spaces))                       # (B,T)
    real, hidden = ~by_word(completions != tokens, is_space), by_word(mask, is_space)     # (B,T)
    losses = F.binary_cross_entropy_with_logits(judge(completions), real.float(), reduction="none")
    return 0.85 * losses[hidden].mean() + 0.15 * losses[~hidden].mean()


def fit(name, model, loss_fn, steps, learning_rate, out_dir, args):
    """AdamW, warm-up, cosine to zero; `loss_fn(model, step)` is a step's loss. Saved every SAVE_INTERVAL steps, goes on with --resume."""
    state_file = Path(out_dir) / f"{name}_state.pt"
    recipe = {key: value for key, value in vars(args).items() if key not in ("resume", "compile", "out_dir")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    start = 0
    if args.resume and state_file.exists():
        state = read(state_file)
        if state["recipe"] != recipe:
            raise ValueError(f"--resume: {state_file} was made with {state['recipe']}, now asked for {recipe}; repeat its arguments, or name a new --out_dir")
        model.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    forward = torch.compile(model) if args.compile else model
    average = None
    with tqdm(range(start, steps), initial=start, total=steps, desc=name, dynamic_ncols=True, mininterval=1) as bar:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min((step + 1) / min(200, 1 + steps // 5), 0.5 * (1 + math.cos(math.pi * step / steps)))
            loss = loss_fn(forward, step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average = loss.item() if average is None else 0.99 * average + 0.01 * loss.item()
            bar.set_postfix(loss=f"{average:.4f}", refresh=False)
            if (step + 1) % SAVE_INTERVAL == 0 or step + 1 == steps:
                write(state_file, {"weights": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "recipe": recipe})
    return model.eval()


@torch.no_grad()
def auc(judge, text, fills):
    """Share of (original, fill) pairs, every original against every fill, in which the judge prefers the original."""
    real, fake = (judge.score(rows)[:, None] for rows in (text, fills))                   # (B,1)
    return ((real > fake.T).float() + 0.5 * (real == fake.T).float()).mean().item()


@torch.no_grad()
def report(generator, judge, dataset, size=1024):
    """Held-out accuracy of the generator's best guess, and the judge's AUC against its draws at temperature 1, by masking."""
    block_size = generator.trunk.config.block_size
    tests = {"random 15%": ("random", 0.15, 0), "random 30%": ("random", 0.30, 0), "random and short runs 15%": ("random:0.5,sticky:0.5", 0.15, 0),
             "one word": ("word", 0, 1), "two words": ("word", 0, 2)}
    figures = {}
    for i, (name, (masking, ratio, words)) in enumerate(tests.items()):
        tokens, mask = dataset.batch(size, block_size, parse_masking(masking), ratio, words, (7, i))
        logits = generator(tokens.masked_fill(mask, dataset.mask_id))                     # (B,T,V)
        right = (logits.argmax(-1) == tokens) | ~mask                                     # (B,T)
        figures[name] = {"characters": 1 - (~right).sum().item() / mask.sum().item(), "whole_inputs": right.all(dim=1).float().mean().item()}
        uniforms = torch.rand(*tokens.shape, 1, generator=torch.Generator().manual_seed(i))
        fills = torch.where(mask, draw(integer_weights(logits, 1.0), uniforms).squeeze(-1), tokens)
        figures[name]["judge_auc"] = auc(judge, tokens, fills)
    return figures


def main(argv=None):
    parser = argparse.ArgumentParser(description="Train the generator, then the judge, from random weights.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", default="char_diffusion", help="folder under data/, made by prepare.py")
    parser.add_argument("--out_dir", default="out-pretrain", help="generator.pt and judge.pt are written here")
    parser.add_argument("--generator_steps", type=int, default=8000)
    parser.add_argument("--judge_steps", type=int, default=1500)
    parser.add_argument("--batch_size", type=int, default=64, help="inputs per step")
    parser.add_argument("--block_size", type=int, default=64, help="characters per input")
    parser.add_argument("--n_layer", type=int, default=6, help="layers of the generator")
    parser.add_argument("--judge_layers", type=int, default=3, help="layers of the judge, at most n_layer")
    parser.add_argument("--n_embd", type=int, default=128, help="width, a multiple of 32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile: half a minute to start, then about a fifth faster")
    parser.add_argument("--resume", action="store_true", help="go on from what the same command saved in out_dir")
    args = parser.parse_args(argv)
    with exit_on_mistake("pretrain"):
        if not 1 <= args.judge_layers <= args.n_layer or args.n_embd < 32 or args.n_embd % 32:
            raise ValueError(f"--judge_layers={args.judge_layers} --n_layer={args.n_layer} --n_embd={args.n_embd}: the judge takes 1 to n_layer layers, n_embd a multiple of 32")
        train, val = load_data(args.dataset, args.block_size)
        pretrain(args, train, val)


def pretrain(args, train, val):
    """Both models, one after the other; each is written, in float16, as soon as it is done."""
    torch.manual_seed(args.seed)
    config = TransformerConfig(len(train.vocabulary), args.block_size, args.n_layer, args.n_embd // 32, args.n_embd)
    generator = Generator(config)
    fit("generator", generator, lambda g, step: generator_loss(g, train, args.batch_size, args.block_size, (args.seed, 0, step)),
        args.generator_steps, 2e-3, args.out_dir, args)
    write(Path(args.out_dir) / "generator.pt", model_file(generator, train.vocabulary, torch.float16))

    judge = Judge(replace(config, n_layer=args.judge_layers))
    first_layers = generator.trunk.state_dict()
    judge.trunk.load_state_dict({name: first_layers[name] for name in judge.trunk.state_dict()})
    fit("judge", judge, lambda j, step: judge_loss(j, generator, train, args.batch_size, args.block_size, (args.seed, 1, step)),
        args.judge_steps, 1e-3, args.out_dir, args)
    write(Path(args.out_dir) / "judge.pt", model_file(judge, train.vocabulary, torch.float16))

    for name, row in report(generator, judge, val).items():
        print(f"{name:26s}" + "".join(f"  {key} {value:.3f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
