"""Fill in the blanks, before and after GRPO, and show the most probable completions.

    python -m grpo.tools.fill "4_7+4_1=888" --run=out
    python -m grpo.tools.fill "th_ c_t" "_ d_g" --run=out-text --k=8

From Python:

    from data.vocabulary import encode
    from grpo.run.load import load_run
    from grpo.tools.fill import fill

    _, models, *_ = load_run("out", {})
    for text, log_prob in fill(models.policy, encode("4_7+4_1=888")):
        print(text, log_prob)

Nothing is drawn here, so everybody sees the same list. The first column is the exact probability
that the model writes this completion in one pass, without truncation. If the run has a rule, a
completion is `correct`, `valid`, or whatever the rule is called, or else `wrong`. If it has a
judge, that has `accepted` a completion with a score above 0, and `rejected` the rest.

Shapes: T characters, V vocabulary, n completions.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data.dataset import encode_prompt
from data.rules import Rule, check
from data.user_mistake import Mistake, run_program
from data.vocabulary import MASK_ID, decode, encode, highlight
from grpo.batch import make_batch
from grpo.policy import Policy
from grpo.reward import judge_scores
from grpo.run.arguments import read_arguments, within
from grpo.run.load import Models, load_run

WIDTH = 256  # how many beginnings the search keeps


@dataclass
class Settings:
    run: str = "out"  # the folder of a run
    k: int = within(5, 1, 20)  # how many completions to show


@torch.no_grad()
def fill(policy: Policy, masked: Tensor, k: int = 5) -> list[tuple[str, float]]:
    """Find the k most probable completions of masked (T,), each with its log-probability in nats.

    It's a beam search: fill the blanks from left to right, and keep the 256 best beginnings. With
    independent blanks it can't miss any of the k, because the best completions have the best
    beginnings. With a latent it could, but only if there are more than two blanks.
    """
    found = masked[None, None]  # (1,n,T)
    q = policy(found[0])
    V = policy.network.vocab_size
    for t in (masked == MASK_ID).nonzero():
        found = found.repeat_interleave(V, dim=1)  # (1,n·V,T)
        found[0, :, t] = torch.arange(found.shape[1])[:, None] % V
        # the log q of a blank doesn't depend on those to its right, so they may be open
        log_prob = q.log_likelihood(found)[0, :, : t + 1].sum(dim=-1)  # (n·V,)
        log_prob, order = log_prob.sort(descending=True, stable=True)
        found = found[:, order[:WIDTH]]  # (1,n,T)
    return list(zip(decode(found), log_prob.tolist()))[:k]


def describe(completion: str, masked: Tensor, models: Models, rule: Rule | None) -> list[str]:
    """Say what a run's rule and judge make of a completion of masked (T,)."""
    batch = make_batch(masked[None], masked[None] == MASK_ID, 1, (0,))
    tokens = encode(completion)[None, None]  # (1,1,T)
    cells = []
    if rule:
        good = check(rule, tokens, batch.masked)  # (1,1)
        cells.append(rule.name if good else "wrong")
    if models.judge:
        score = judge_scores(models.judge, tokens, batch)  # (1,1)
        cells.append("accepted" if score > 0 else "rejected")
    return cells


def main(arguments: list[str]) -> None:
    given, texts = read_arguments(Settings, arguments, __doc__)
    settings = Settings(**given)
    if not texts:
        raise Mistake('name a text with blanks: python -m grpo.tools.fill "4_7+4_1=888"')
    # every run has the reward `chain`, and its own may be a file that we'd have to execute
    changes = {"reward": "chain", "device": "cpu", "dtype": "float32"}
    changes |= {"kernel": "torch", "compile": False}
    config, models, _, held_out = load_run(settings.run, changes)
    before, after = f"before  {config.generator_checkpoint}", f"after   {settings.run}"
    policies = {before: models.base, after: models.policy}
    for text in texts:
        vocab_size = models.base.network.vocab_size
        masked = encode_prompt(text, config.block_size, "text", vocab_size)  # (T,)
        for title, policy in policies.items():
            print(title, "  probability", sep="\n")
            for completion, log_prob in fill(policy, masked, settings.k):
                cells = describe(completion, masked, models, held_out.rule)
                shown = highlight(completion, (masked == MASK_ID).tolist())
                print(f"  {math.exp(log_prob):11.2g}", *cells, shown, sep="  ")


if __name__ == "__main__":
    run_program(main)
