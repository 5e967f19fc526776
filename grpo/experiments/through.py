"""Learn from what the judge says about each digit: differentiate through it, or ask.

    python -m grpo.experiments.through straight out-straight
    python -m grpo.experiments.through asking out-asking --batch_size=32 --max_iters=300 \\
        --learning_rate=5e-4 --kl_beta=0.1
    python -m grpo.evaluation out-asking/generator.pt config/rule.py    # measure what came out
    python -m grpo.experiments.through show                             # compare the two

The judge is a network, so why not backpropagate through it, as a GAN does? The draw of a digit is
in the way. But if somebody told us what each digit v of a blank is worth, c(v), we could maximize
Σ_v q(v) c(v), and we'd need no group. Who could?

    straight  The judge's gradient. A drawn digit enters the judge as a one-hot vector times the
              embeddings, so c(v) is the derivative of the score by entry v of that vector. That's
              straight-through (1308.3432). With --gumbel, the noise of the draw is in q, too
              (1611.01144)
    asking    The judge itself: c(v) is its score with v at this blank, and all others as drawn.
              For each blank the gradient is exact (1503.01494), and costs nine more calls
    show      prints both, for one input, and how they correlate over all inputs

All else is as in train_grpo.py: the inputs, the KL, the average and the optimizer, and each draw is
used num_iterations times. There's no ratio and no clip. --group_size is the number of draws.

Shapes: B inputs, T characters, G draws of each input, n blanks of all inputs, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import trange

from data.user_mistake import Mistake, run_program
from data.vocabulary import decode, encode
from grpo.batch import Batch, draw_batch
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


def consult(opinion, judge: Judge, log_q: Tensor, batch: Batch, args: Settings):
    """Draw digits from log_q (n,10), and ask for c: -> Gumbel noise (G,n,10), c (G,n,10)."""
    noise = -torch.empty(args.group_size, *log_q.shape).exponential_().log()  # (G,n,10)
    drawn = DIGITS[(log_q + noise).argmax(dim=-1)]  # (G,n)
    filled = [batch.masked.masked_scatter(batch.mask, y) for y in drawn]  # G times (B,T)
    c = [opinion(judge, each, batch.mask, args.limit) for each in filled]  # G times (n,10)
    return noise, torch.stack(c)


def loss(log_q: Tensor, log_ref: Tensor, noise: Tensor, c: Tensor, args: Settings) -> Tensor:
    """Compute β·KL − Σ_v q(v) c(v) of each blank, from log q and log q_ref (n,V): -> (n,)."""
    kl = (log_q.exp() * (log_q - log_ref)).sum(dim=-1)  # (n,)
    logits = log_q[:, DIGITS] + noise if args.gumbel else log_q[:, DIGITS]
    q = (logits / args.soft).softmax(dim=-1)  # (G,n,10), or (n,10) if there's no noise in it
    return args.kl_beta * kl - (q * c).sum(dim=-1).mean(dim=0)


def learn(opinion, args: Settings, policy, reference, judge: Judge, train) -> None:
    """Let the policy learn. As in GRPO, each draw is used num_iterations times."""
    optimizer = Optimizer(make_adamw(policy.network, args), args.grad_clip)
    for step in trange(args.max_iters, dynamic_ncols=True):
        optimizer.set_learning_rate(learning_rate(step, args))
        batch = draw_batch(train, args, step, CPU)
        weights = loss_weights(batch.mask, args)[batch.mask]  # (n,)
        log_old, log_ref = (
            p(batch.masked).log_marginals()[batch.mask].detach() for p in (policy, reference)
        )  # (n,V)
        draws = consult(opinion, judge, log_old[:, DIGITS], batch, args)  # (G,n,10) each
        for _ in range(args.num_iterations):
            log_q = policy(batch.masked).log_marginals()[batch.mask]  # (n,V)
            total = weights @ loss(log_q, log_ref, *draws, args)
            total.backward()
            if not optimizer.step_if_finite(total.detach()).isfinite():
                raise FloatingPointError(f"step {step}: the gradient isn't finite")


def show(policy, judge: Judge, batch: Batch, limit: float) -> None:
    """Print how the score changes with each digit, by both opinions, for an input with 2 blanks."""
    q = policy(batch.masked).log_marginals().exp()[batch.mask][:, DIGITS]  # (n,10)
    drawn = q.multinomial(1)  # (n,1)
    filled = batch.masked.masked_scatter(batch.mask, DIGITS[drawn])  # (B,T)
    c = torch.stack([ask(judge, filled, batch.mask, limit) for ask in OPINIONS.values()])
    change = c - c.take_along_dim(drawn[None], dim=-1)  # (2,n,10)
    b, _ = batch.mask.nonzero(as_tuple=True)  # (n,)
    chosen = (batch.mask.sum(dim=1) == 2).int().argmax()
    torch.set_printoptions(precision=2, sci_mode=False, linewidth=100)
    print(*decode(batch.masked[chosen]), "filled as", *decode(filled[chosen]))
    for name, each in zip(OPINIONS, change[:, b == chosen]):
        print(f"{name}, a row for each blank, a column for each digit:\n{each}")
    pairs = change[:, drawn != DIGITS - DIGITS[0]]  # (2,9n)
    r, deviations = pairs.corrcoef()[0, 1], pairs.std(dim=1)
    print(f"all {len(b)} blanks: correlation {r:.2f}, deviations {deviations}")


def read(arguments: list[str]) -> tuple[str, Path, Settings]:
    """Read the command line: -> whom it learns from, its folder, settings. Raises a Mistake."""
    given, words = read_arguments(Settings, arguments, __doc__)
    if words != ["show"] and (len(words) != 2 or words[0] not in OPINIONS):
        raise Mistake("name `straight` or `asking` and a folder to write, or `show`")
    return words[0], Path(words[-1]), Settings(**given)


def main(arguments: list[str]) -> None:
    name, out_dir, args = read(arguments)
    if name != "show" and out_dir.exists():
        raise Mistake(f"{out_dir} exists; name another folder")
    torch.manual_seed(args.seed)
    policy, reference, *_ = load_models(args, CPU)
    judge = load_model(args.judge_checkpoint, Judge).requires_grad_(False)
    train, _ = load_splits(args, policy.network.vocab_size)
    if name == "show":
        return show(policy, judge, draw_batch(train, args, 0, CPU), args.limit)
    calls = []
    judge.head.register_forward_hook(lambda head, inputs, logits: calls.append(len(logits)))
    learn(OPINIONS[name], args, policy, reference, judge, train)
    write(out_dir / "generator.pt", model_file(policy.network, torch.float16))
    print(f"{sum(calls)} judge calls")


if __name__ == "__main__":
    run_program(main)
