"""Train the models that GRPO starts from: the generator (fill the blanks), then the judge.

    python -m model.pretrain --out_dir=out-pretrain            # both, in half an hour on one core

The generator learns to fill masked characters. The judge starts as a copy of the generator, and
learns to tell the generator's draws from text. `model/losses.py` has both losses, and
`model/report.py` measures how good the two models are. If it's stopped, the same command goes on
where it was, a hundred steps back at most.
"""

import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train_grpo.py

import torch
from tqdm import tqdm

from data.masking import parse_masking
from data.user_mistake import Mistake, run_program
from grpo.run.arguments import read_arguments, within
from grpo.run.checkpoint import load_model, model_file, write
from grpo.run.config import Config
from grpo.run.load import check_fit, load_splits
from grpo.run.network import make_judge, make_policy, pick_device, set_threads
from model.losses import PRETRAINING, generator_loss, judge_loss, masked_batch
from model.report import report
from model.transformer import Generator, Judge, LatentGenerator, TransformerConfig

UNFINISHED = "unfinished.pt"  # in out_dir, while the training isn't done
SAVE_EVERY = 100  # steps


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
    how = {"weight_decay": 0.05, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(matrices, lr=learning_rate, **how)
    adamw = torch.optim.AdamW(rest, lr=learning_rate / 4, betas=(0.9, 0.98), weight_decay=0.05)
    return muon, adamw


def schedule(step, steps):
    """Return the learning rate as a share of its peak. It warms up, then falls to 0 as a cosine."""
    warm_up = (step + 1) / min(200, 1 + steps // 5)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(warm_up, cosine)


def fit(name, model, loss_fn, steps, optimizers, start=0, save=None):
    """Train the model to minimize `loss_fn(step)`, from step `start` on.

    Now and then this calls save(step, optimizers), if there is such a function.
    """
    bar = tqdm(range(start, steps), name, initial=start, total=steps, dynamic_ncols=True)
    for step in bar:
        loss = loss_fn(step)
        if not loss.isfinite():
            raise FloatingPointError(f"{name}: the loss of step {step} is {loss.item()}")
        if save and step % SAVE_EVERY == 0:
            save(step, optimizers)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * schedule(step, steps)
            optimizer.step()
        model.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)


def make_models(args, vocab_size):
    """Make a generator, new or from a file, and a judge with random weights.

    `pretrain` copies the generator's trunk into the judge, once the generator is trained.
    """
    torch.manual_seed(args.seed)
    if args.start:
        generator = load_model(args.start, Generator)
    else:
        width = args.n_embd
        sizes = (vocab_size, args.block_size, args.n_layer, width // 32, width)
        generator = Generator(TransformerConfig(*sizes))
    if args.n_latent > 1 and generator.n_latent == 1:
        generator = with_latent(generator, args.n_latent)
    return generator, Judge(replace(generator.trunk.config, n_latent=1))


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


def pretrain(args):
    """Train the generator, then the judge, and write each in float16 as soon as it is trained."""
    settings = asdict(args)
    device = args.device = pick_device(args.device)
    config = Config(
        dataset=args.dataset,
        generator_checkpoint=args.start,
        block_size=args.block_size,
        batch_size=args.batch_size,
        dtype=args.dtype,
    )
    known = load_model(args.start, Generator).vocab_size if args.start else None
    train, val = load_splits(config, known)
    generator, judge = make_models(args, train.vocab_size)
    set_threads(generator)
    check_fit(args.start, generator, args.block_size)
    policy = make_policy(generator, config, device)
    score = make_judge(judge, config, device)

    def loss_of_generator(step):
        seed = (PRETRAINING, args.seed, 0, step)
        return generator_loss(policy, masked_batch(train, args, args.masking, seed, reveal=True))

    def loss_of_judge(step):
        # At first the draws have a high temperature, which makes them easy to tell from text. With
        # good draws alone it could take long to learn a difference.
        temperature = 1 + max(0, 1 - 2 * step / args.judge_steps)
        seed = (PRETRAINING, args.seed, 1, step)
        return judge_loss(score, policy, train, args, temperature, seed)

    out = Path(args.out_dir)
    models = {"generator": generator, "judge": judge}
    losses = {"generator": loss_of_generator, "judge": loss_of_judge}
    rates = {"generator": args.generator_rate, "judge": args.judge_rate}
    steps = {"generator": args.generator_steps, "judge": args.judge_steps}
    unfinished = read_unfinished(out / UNFINISHED, settings)
    for name, model in models.items():
        if not steps[name] or unfinished.get("training", name) != name:
            continue
        start, optimizers = 0, make_optimizers(model, rates[name])
        if unfinished:
            start = unfinished["step"]
            for each in models:
                models[each].load_state_dict(unfinished[each])
            for optimizer, state in zip(optimizers, unfinished["optimizers"]):
                optimizer.load_state_dict(state)
            unfinished = {}
        elif name == "judge":
            judge.trunk.load_state_dict(generator.trunk.state_dict())

        def save(step, optimizers, training=name):
            content = {name: model.state_dict() for name, model in models.items()}
            content["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
            content |= {"training": training, "step": step, "settings": settings}
            write(out / UNFINISHED, content)

        fit(name, model, losses[name], steps[name], optimizers, start, save)
        write(out / f"{name}.pt", model_file(model, torch.float16))
    (out / UNFINISHED).unlink(missing_ok=True)
    masking = args.judge_masking if args.judge_steps else args.masking
    report(policy, score if args.judge_steps else None, val, train.rule, masking, device)


def read_unfinished(path: Path, settings: dict) -> dict:
    """Read what's done of a training that was stopped, or {}. It must be of the same settings."""
    if not path.exists():
        return {}
    content = torch.load(path, weights_only=True)
    if content["settings"] != settings:
        raise Mistake(f"{path} is of other settings; name another out_dir, or remove it")
    return content


def main(arguments: list[str]) -> None:
    given, words = read_arguments(Settings, arguments, __doc__)
    args = Settings(**given)
    if words:
        raise Mistake(f"{words[0]!r} is neither a config file (a .py) nor a flag (--key=value)")
    parse_masking(args.masking)
    parse_masking(args.judge_masking)
    if args.n_embd % 32:
        raise Mistake(f"n_embd={args.n_embd} isn't a multiple of 32; name one")
    out = Path(args.out_dir)
    if out.exists() and not (out / UNFINISHED).exists():
        raise Mistake(f"out_dir={args.out_dir} exists; remove it, or name another --out_dir")
    pretrain(args)


if __name__ == "__main__":
    run_program(main)
