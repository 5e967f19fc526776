"""Train the models that GRPO starts from: the generator (fill the blanks), then the judge.

    python -m model.pretrain --out_dir=out-pretrain            # both, in half an hour on one core

The generator learns to fill masked characters. The judge starts as a copy of the generator, and
learns to tell the generator's draws from text. `model/losses.py` has both losses, and
`model/report.py` measures how good the two models are.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train_grpo.py

import torch
from tqdm import tqdm

from data.files import check_new
from data.user_mistake import Mistake, run_program
from grpo.run.arguments import read_flags, within
from grpo.run.checkpoint import load_model, model_file, write
from grpo.run.config import Config
from grpo.run.load import load_splits, make_policy, pick_device, place, set_threads
from model.losses import PRETRAINING, generator_loss, judge_loss, masked_batch
from model.report import report
from model.transformer import Generator, Judge, LatentGenerator, TransformerConfig


@dataclass
class Settings:
    dataset: str = "text"  # a folder under data/, or an absolute path
    out_dir: str = "out-pretrain"  # generator.pt and judge.pt are written here
    # A generator.pt to begin from. Its size replaces n_layer and n_embd. Empty: random weights.
    start: str = ""
    masking: str = "words:0.6,random:0.4"  # what is hidden from the generator
    judge_masking: str = "short"  # what is hidden in the judge's training
    block_size: int = within(64, 2)  # characters per input
    n_layer: int = 6  # layers of the generator
    n_embd: int = within(128, 32)  # width, a multiple of 32
    n_latent: int = 1  # how many values the latent can take (grpo/latent.py); 1: no latent
    batch_size: int = 64  # inputs per step
    generator_steps: int = within(2500, 0)  # training steps of the generator; 0: none
    generator_rate: float = 8e-3  # its peak learning rate, of Muon; of AdamW it's a quarter
    judge_steps: int = within(1000, 0)  # training steps of the judge; 0: make no judge
    judge_rate: float = 4e-3
    seed: int = within(1, 0)  # for the weights, inputs and draws
    # auto: bfloat16 if it is fast here. A step then takes two thirds of the time.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"  # auto, cpu, cuda, cuda:1; auto: cuda if there is a GPU


def make_optimizers(model, learning_rate):
    """Make Muon (Jordan et al. 2024) for the matrices of the blocks, and AdamW for the rest."""
    matrices = [p for p in model.trunk.blocks.parameters() if p.dim() == 2]
    taken = set(matrices)
    rest = [p for p in model.parameters() if p not in taken]
    # With match_rms_adamw, Muon's steps are as long as those of AdamW at the same learning rate
    # (2502.16982).
    muon = torch.optim.Muon(
        matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(rest, lr=learning_rate / 4, betas=(0.9, 0.98), weight_decay=0.05)
    return muon, adamw


def schedule(step, steps):
    """Return the learning rate as a share of its peak. It warms up, then falls to 0 as a cosine."""
    warm_up = (step + 1) / min(200, 1 + steps // 5)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(warm_up, cosine)


def fit(name, model, loss_fn, steps, optimizers):
    """Train the model to minimize `loss_fn(step)`."""
    bar = tqdm(range(steps), name, dynamic_ncols=True)
    for step in bar:
        loss = loss_fn(step)
        if not loss.isfinite():
            raise FloatingPointError(f"{name}: the loss of step {step} is {loss.item()}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * schedule(step, steps)
            optimizer.step()
        model.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)


def load_or_make(args, config):
    """Load the generator to begin from, or make one with random weights. Load its dataset, too.

    -> generator, what to train on, what's held out.
    """
    if args.start:
        generator = load_model(args.start, Generator, args.block_size)
        train, val = load_splits(config, generator.vocab_size)
    else:
        train, val = load_splits(config)
        width = args.n_embd
        sizes = (train.vocab_size, args.block_size, args.n_layer, width // 32, width)
        generator = Generator(TransformerConfig(*sizes))
    if args.n_latent > 1 and generator.n_latent == 1:
        generator = with_latent(generator, args.n_latent)
    return generator, train, val


def with_latent(product, n_latent):
    """Make a generator that has a latent of `n_latent` values, from the generator `product`.

    It copies the trunk of `product`. For each value of the latent it copies the head of `product`,
    and adds a little noise to it.
    """
    generator = LatentGenerator(replace(product.trunk.config, n_latent=n_latent))
    generator.trunk.load_state_dict(product.trunk.state_dict())
    head = product.head.weight.detach().repeat(n_latent, 1)  # (K·(V-1),C)
    noise = 0.1 * head.std() * torch.randn_like(head)
    generator.head.weight.data.copy_(head + noise)
    return generator


def main(arguments: list[str]) -> None:
    """Train the generator, then the judge, and write each in float16 as soon as it is trained."""
    args = Settings(**read_flags(Settings, arguments, __doc__))
    if args.n_embd % 32:
        raise Mistake(f"n_embd={args.n_embd} isn't a multiple of 32; name one")
    out = Path(args.out_dir)
    check_new(out)
    device = args.device = pick_device(args.device)
    config = Config(
        dataset=args.dataset,
        generator_checkpoint=args.start,
        block_size=args.block_size,
        batch_size=args.batch_size,
        dtype=args.dtype,
    )
    torch.manual_seed(args.seed)
    generator, train, val = load_or_make(args, config)
    judge = Judge(replace(generator.trunk.config, n_latent=1))
    # raise a Mistake now, not after training, if a masking hides nothing here
    train.batch(1, args.masking, (0,))
    if args.judge_steps:
        try:
            train.batch(1, args.judge_masking, (0,))
        except Mistake as error:
            raise Mistake(f"judge_masking: {error}") from None
    set_threads(generator)
    policy = make_policy(generator, config, device)
    score = place(judge, config, device)(judge)  # torch.autocast is a decorator, too

    def loss_of_generator(step):
        seed = (PRETRAINING, args.seed, 0, step)
        return generator_loss(policy, masked_batch(train, args, args.masking, seed, reveal=True))

    def loss_of_judge(step):
        # At first the draws have a high temperature, which makes them easy to tell from text. With
        # good draws alone it could take long to learn a difference.
        temperature = 1 + max(0, 1 - 2 * step / args.judge_steps)
        seed = (PRETRAINING, args.seed, 1, step)
        return judge_loss(score, policy, train, args, temperature, seed)

    optimizers = make_optimizers(generator, args.generator_rate)
    fit("generator", generator, loss_of_generator, args.generator_steps, optimizers)
    write(out / "generator.pt", model_file(generator, torch.float16))
    if args.judge_steps:
        judge.trunk.load_state_dict(generator.trunk.state_dict())
        optimizers = make_optimizers(judge, args.judge_rate)
        fit("judge", judge, loss_of_judge, args.judge_steps, optimizers)
        write(out / "judge.pt", model_file(judge, torch.float16))
        report(policy, score, val, train.rule, args.judge_masking, device)
    else:
        report(policy, None, val, train.rule, args.masking, device)


if __name__ == "__main__":
    run_program(main)
