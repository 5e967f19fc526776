"""Learn from what the judge says about each digit: differentiate through it, or ask.

    python -m grpo.experiments.through show --batch_size=256 --seed=2    # compare the two
    python -m grpo.experiments.through straight --out_dir=out-straight --learning_rate=5e-4 \\
        --kl_beta=0.25 --max_iters=100
    python -m grpo.experiments.through asking --out_dir=out-asking --learning_rate=5e-4 \\
        --kl_beta=0.1 --batch_size=32 --max_iters=300 --num_iterations=2
    python -m grpo.evaluation out-asking/generator.pt config/rule.py    # measure what came out

The judge is a network, so why not backpropagate through it, as a GAN does? The draw of a digit is
in the way. But if somebody told us what each digit v of a blank is worth, c(v), we could maximize
Σ_v q(v) c(v), and we'd need no group. Who could?

    straight  The judge's gradient. A drawn digit enters the judge as a one-hot vector times the
              embeddings, so c(v) is the derivative of the score by entry v of that vector. That's
              straight-through (1308.3432)
    asking    The judge itself: c(v) is its score with v at this blank, and all others as drawn.
              For each blank the gradient is exact (1503.01494), and costs nine more calls
    show      prints both, for one input, and how they correlate over all inputs

All else is as in train_grpo.py: the inputs, the KL, the average and the optimizer, and each draw is
used num_iterations times. There's one draw of each input, no ratio and no clip, and scores aren't
cut off.

Shapes: B inputs, T characters, n blanks of all inputs, V vocabulary.
"""

from pathlib import Path

import torch
from torch import Tensor
from tqdm import trange

from data.files import check_new
from data.user_mistake import Mistake, run_program
from data.vocabulary import decode, encode
from grpo.batch import Batch, draw_batch
from grpo.loss import loss_weights
from grpo.optimizer import Optimizer, learning_rate, make_adamw
from grpo.reward import judge_logits, mean_over_blanks
from grpo.run.checkpoint import load_model, model_file, write
from grpo.run.config import Config, load_config
from grpo.run.load import load_models, load_splits
from model.transformer import Judge

CPU = torch.device("cpu")
DIGITS = encode("0123456789")  # (10,)


def straight(judge: Judge, filled: Tensor, mask: Tensor) -> Tensor:
    """Differentiate the scores of filled (B,T) by each digit's entry at each blank: -> (n,10)."""
    trunk, T = judge.trunk, filled.shape[1]
    embedded = x = trunk.embedding(filled).requires_grad_()  # (B,T,C)
    for block in trunk.blocks:
        x = block(x, trunk.cos[:T], trunk.sin[:T])  # (B,T,C)
    logits = judge.head(trunk.norm(x)).mT  # (B,1,T)
    scores = mean_over_blanks(logits, mask)  # (B,1)
    (gradient,) = torch.autograd.grad(scores.sum(), embedded)  # (B,T,C)
    return gradient[mask] @ trunk.embedding.weight[DIGITS].T


def asking(judge: Judge, filled: Tensor, mask: Tensor) -> Tensor:
    """Score filled (B,T) with each digit tried at each blank: -> (n,10)."""
    b, t = mask.nonzero(as_tuple=True)  # (n,)
    texts = filled[b, None].repeat(1, len(DIGITS), 1)  # (n,10,T)
    texts[torch.arange(len(b)), :, t] = DIGITS
    return mean_over_blanks(judge_logits(judge, texts), mask[b])


OPINIONS = {"straight": straight, "asking": asking}


def loss(policy, log_ref: Tensor, c: Tensor, batch: Batch, config: Config) -> Tensor:
    """Average β·KL − Σ_v q(v) c(v) over blanks: log q_ref (n,V), c (n,10) -> ()."""
    log_q = policy(batch.masked).log_marginals()[batch.mask]  # (n,V)
    kl = (log_q.exp() * (log_q - log_ref)).sum(dim=-1)  # (n,)
    worth = (log_q[:, DIGITS].softmax(dim=-1) * c).sum(dim=-1)  # (n,)
    return loss_weights(batch.mask, config)[batch.mask] @ (config.kl_beta * kl - worth)


def learn(opinion, policy, reference, judge: Judge, train, config: Config) -> None:
    """Let the policy learn. As in GRPO, each draw is used num_iterations times."""
    optimizer = Optimizer(make_adamw(policy.network, config), config.grad_clip)
    for step in trange(config.max_iters, dynamic_ncols=True):
        optimizer.set_learning_rate(learning_rate(step, config))
        batch = draw_batch(train, config, step, CPU)
        with torch.no_grad():
            log_ref = reference(batch.masked).log_marginals()[batch.mask]  # (n,V)
            filled = policy(batch.masked).sample(batch).completions[:, 0]  # (B,T)
        c = opinion(judge, filled, batch.mask)  # (n,10)
        for _ in range(config.num_iterations):
            value = loss(policy, log_ref, c, batch, config)
            value.backward()
            optimizer.step_if_finite(value.detach())


def show(policy, judge: Judge, batch: Batch) -> None:
    """Print how the score changes with each digit, by both opinions, for an input with 2 blanks."""
    filled = policy(batch.masked).sample(batch).completions[:, 0]  # (B,T)
    others = filled[batch.mask][:, None] != DIGITS  # (n,10), but for the drawn one
    b, _ = batch.mask.nonzero(as_tuple=True)  # (n,)
    chosen = (batch.mask.sum(dim=1) == 2).int().argmax()
    torch.set_printoptions(precision=2, sci_mode=False, linewidth=100)
    print(*decode(batch.masked[chosen]), "filled as", *decode(filled[chosen]))
    changes = []
    for name, opinion in OPINIONS.items():
        c = opinion(judge, filled, batch.mask)  # (n,10)
        change = c - c[~others][:, None]  # (n,10)
        changes.append(change[others])
        print(f"{name}, a row for each blank, a column for each digit:")
        print(change[b == chosen])
    print(f"correlation over all {len(b)} blanks: {torch.stack(changes).corrcoef()[0, 1]:.2f}")


def read(arguments: list[str]) -> tuple[str, Config]:
    """Read the command line: -> whom it learns from, and settings. Raises a Mistake."""
    if not arguments or arguments[0] not in (*OPINIONS, "show"):
        raise Mistake("name `straight`, `asking` or `show`, and then flags")
    config = load_config(arguments[1:])
    if config.dataset != "sums" or not config.judge_checkpoint:
        raise Mistake("it's for sums and their judge; name config/grpo_config.py, or no config")
    return arguments[0], config


def main(arguments: list[str]) -> None:
    name, config = read(arguments)
    out_dir = Path(config.out_dir)
    policy, reference, *_ = load_models(config, CPU)
    judge = load_model(config.judge_checkpoint, Judge).requires_grad_(False)
    train, _ = load_splits(config, policy.network.vocab_size)
    if name == "show":
        show(policy, judge, draw_batch(train, config, 0, CPU))
        return
    check_new(out_dir)
    learn(OPINIONS[name], policy, reference, judge, train, config)
    write(out_dir / "generator.pt", model_file(policy.network, torch.float16))


if __name__ == "__main__":
    run_program(main, __doc__)
