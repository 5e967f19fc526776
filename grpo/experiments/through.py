"""Learn from what the judge says about each digit: differentiate through it, or ask.

    python -m grpo.experiments.through straight out-straight
    python -m grpo.experiments.through asking out-asking --batch_size=64
    python -m grpo.evaluation out-asking/generator.pt config/rule.py    # measure what came out
    python -m grpo.experiments.through show                             # compare the two

The judge is a network, so why not backpropagate through it, as a GAN does? You can't through the
draw of a digit. But if we knew an opinion c(v) on each digit v of a blank, we could maximize
Σ_v q(v) c(v), whose gradient needs no group. Where does c come from?

    straight  From the judge's gradient at the draw. A digit enters as a one-hot vector times the
              embeddings, and c(v) is the derivative of the score by entry v: straight-through
              (1308.3432). With --gumbel, the noise of the draw is in q (1611.01144)
    asking    From the judge's answer: c(v) is the score with v at this blank, and all others as
              drawn. So the gradient is exact for a blank (1503.01494), at ten calls each

All else is as in train_grpo.py: the inputs, the KL, the average and the optimizer. --group_size is
the number of draws. There's no ratio and no clip, because each draw is used once.

Shapes: B inputs, T characters, G draws of each input, n blanks of all inputs, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import trange

from data.user_mistake import Mistake, run_program
from data.vocabulary import decode, encode
from grpo.batch import draw_batch
from grpo.loss import loss_weights
from grpo.optimizer import Optimizer, learning_rate, make_adamw
from grpo.reward import judge_logits, mean_over_blanks
from grpo.run.arguments import TINY, read_arguments, within
from grpo.run.checkpoint import load_model, model_file, write
from grpo.run.config import Config
from grpo.run.load import load_models, load_splits
from model.transformer import Judge

CPU = torch.device("cpu")
DIGITS = encode("0123456789")  # (10,)


@dataclass
class Settings(Config):
    group_size: int = within(1, 1)  # draws of each input
    limit: float = 1e9  # a score is cut off at ± this; GRPO has 8
    gumbel: bool = False  # straight-through Gumbel-softmax
    soft: float = within(1.0, TINY, 100)  # the temperature of the q that's differentiated


def straight(judge: Judge, filled: Tensor, mask: Tensor, limit: float) -> Tensor:
    """Differentiate the scores of filled (B,T) by each digit's entry at each blank: -> (n,10)."""
    trunk, T = judge.trunk, filled.shape[1]
    embedded = x = trunk.embedding(filled).requires_grad_()  # (B,T,C)
    for block in trunk.blocks:
        x = block(x, trunk.cos[:T], trunk.sin[:T])  # (B,T,C)
    logits = judge.head(trunk.norm(x)).mT  # (B,1,T)
    scores = mean_over_blanks(logits, mask).clamp(-limit, limit)  # (B,1)
    (gradient,) = torch.autograd.grad(scores.sum(), embedded)  # (B,T,C)
    return gradient[mask] @ trunk.embedding.weight[DIGITS].T


def asking(judge: Judge, filled: Tensor, mask: Tensor, limit: float) -> Tensor:
    """Score filled (B,T) with each digit tried at each blank: -> (n,10)."""
    b, t = mask.nonzero(as_tuple=True)  # (n,)
    texts = filled[b, None].repeat(1, len(DIGITS), 1)  # (n,10,T)
    texts[torch.arange(len(b)), :, t] = DIGITS
    return mean_over_blanks(judge_logits(judge, texts), mask[b]).clamp(-limit, limit)


OPINIONS = {"straight": straight, "asking": asking}


def loss(opinion, judge, log_q: Tensor, log_ref: Tensor, batch, args: Settings) -> Tensor:  # (n,)
    """Compute β·KL − Σ_v q(v) c(v) of each blank, from log q and log q_ref (n,V)."""
    kl = (log_q.exp() * (log_q - log_ref)).sum(dim=-1)  # (n,)
    values = []
    for _ in range(args.group_size):
        noise = -torch.empty_like(log_q).exponential_().log()  # (n,V) Gumbel
        drawn = (log_q + noise).argmax(dim=-1)  # (n,) from q
        filled = batch.masked.masked_scatter(batch.mask, drawn)  # (B,T)
        logits = (log_q + noise if args.gumbel else log_q) / args.soft  # (n,V)
        q = logits[:, DIGITS].softmax(dim=-1)  # (n,10)
        values.append((q * opinion(judge, filled, batch.mask, args.limit)).sum(dim=-1))  # (n,)
    return args.kl_beta * kl - sum(values) / args.group_size


def learn(opinion, args: Settings, policy, reference, judge: Judge, train) -> None:
    torch.manual_seed(args.seed)
    optimizer = Optimizer(make_adamw(policy.network, args), args.grad_clip)
    for step in trange(args.max_iters, dynamic_ncols=True):
        batch = draw_batch(train, args, step, CPU)
        both = [p(batch.masked).log_marginals()[batch.mask] for p in (policy, reference)]  # (n,V)
        losses = loss(opinion, judge, *both, batch, args)  # (n,)
        total = losses @ loss_weights(batch.mask, args)[batch.mask]  # ()
        total.backward()
        optimizer.set_learning_rate(learning_rate(step, args))
        if not optimizer.step_if_finite(total.detach()).isfinite():
            raise FloatingPointError(f"step {step}: the gradient isn't finite")


def show(args: Settings, policy, judge: Judge, train) -> None:
    """Print how the score changes with a digit: if it's tried, and by the judge's gradient."""
    batch = draw_batch(train, args, 0, CPU)
    filled = policy(batch.masked).sample(batch).completions[:, 0]  # (B,T)
    other = filled[batch.mask][:, None] != DIGITS  # (n,10)
    changes = {}
    for name, opinion in OPINIONS.items():
        c = opinion(judge, filled, batch.mask, args.limit)  # (n,10)
        changes[name] = c - c[~other][:, None]
    i = (batch.mask.sum(dim=1) == 2).int().argmax()
    print(*decode(batch.masked[i]), "was filled as", *decode(filled[i]))
    for n, (b, t) in enumerate(batch.mask.nonzero()):
        for name, change in changes.items():
            if b == i:
                print(f"position {t}, {name:8}", *(f"{x:+6.2f}" for x in change[n]))
    pairs = torch.stack([change[other] for change in changes.values()])  # (2,9n)
    r, deviations = pairs.corrcoef()[0, 1], pairs.std(dim=1)
    print(
        f"all {len(other)} blanks: correlation {r:.2f}, deviations",
        *map("{:.2f}".format, deviations),
    )


def main(arguments: list[str]) -> None:
    given, words = read_arguments(Settings, arguments, __doc__)
    args = Settings(**given)
    name, *folder = words or [""]
    if name != "show" and name not in OPINIONS or len(folder) != (name in OPINIONS):
        raise Mistake("name `straight` or `asking` and a folder to write, or `show`")
    if folder and Path(folder[0]).exists():
        raise Mistake(f"{folder[0]} exists; name another folder")
    policy, reference, *_ = load_models(args, CPU)
    reference.network.requires_grad_(False)
    judge = load_model(args.judge_checkpoint, Judge).requires_grad_(False)
    train, _ = load_splits(args, policy.network.vocab_size)
    if name == "show":
        return show(args, policy, judge, train)
    calls = []
    judge.head.register_forward_hook(lambda head, inputs, logits: calls.append(len(logits)))
    learn(OPINIONS[name], args, policy, reference, judge, train)
    write(Path(folder[0]) / "generator.pt", model_file(policy.network, torch.float16))
    print(f"{sum(calls)} judge calls")


if __name__ == "__main__":
    run_program(main)
