"""Write answers for `python -m model.pretrain --answers=FILE`: a masked sum, a tab and its answer.

    python .github/answers.py even FILE                        # the most even right answer
    python .github/answers.py argmax FILE --run=out            # the ones that a GRPO run found
    python .github/answers.py passes FILE                      # the base's, one blank a pass
    python .github/answers.py best FILE                        # the judge's best of 16 of the base
    python .github/answers.py best FILE --run=out-a/generator.pt     # or of another generator

The inputs are 100,000 drawn from the training split, as a run would draw them.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from data.dataset import make_if_missing, read_splits
from data.sums.rule import right_answers
from data.vocabulary import decode
from grpo.batch import make_batch
from grpo.evaluation.rivals import best_by_word, fill_in_passes
from grpo.reward import log_odds
from grpo.run.checkpoint import LATEST, load_model
from grpo.run.config import Config
from grpo.run.network import make_judge, make_policy
from model.transformer import Generator, Judge

SIZE, PART = 100_000, 1000  # all inputs, and those that are filled at once
CPU = torch.device("cpu")


def most_even(masked: str) -> str:
    """Return the right answer whose summands differ least."""

    def difference(answer: str) -> int:
        first, second = answer.split("=")[0].split("+")
        return abs(int(first) - int(second))

    return min(right_answers(masked), key=difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=["even", "argmax", "passes", "best"])
    parser.add_argument("file")
    parser.add_argument("--run", default=Config.generator_checkpoint)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = Config(batch_size=PART)
    make_if_missing("sums")
    train, _ = read_splits("sums", config.block_size)
    tokens, mask, words = train.batch(SIZE, config.masking, (3, args.seed))  # (N,T)
    path = Path(args.run)
    path = path / LATEST if path.is_dir() else path
    policy = make_policy(load_model(path, Generator), config, CPU)
    judge = make_judge(load_model(config.judge_checkpoint, Judge), config, CPU)
    lines = []
    with torch.no_grad():
        for start in range(0, SIZE, PART):
            rows = slice(start, start + PART)
            batch = make_batch(tokens[rows], mask[rows], words[rows], 16, (3, args.seed, start))
            masked = decode(batch.masked)
            if args.kind == "even":
                answers = [most_even(text) for text in masked]
            elif args.kind == "argmax":
                answers = decode(policy(batch).best_guess())
            elif args.kind == "passes":
                filled, _ = fill_in_passes(policy, batch, train.number_words, "left to right")
                answers = decode(filled)
            else:
                q = policy(batch)
                completions = q.sample().completions  # (1000,16,T)
                scores = log_odds(judge, completions, batch)  # (1000,16,T)
                answers = decode(best_by_word(q, completions, scores))
            lines += [f"{a}\t{b}\n" for a, b in zip(masked, answers)]
    Path(args.file).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
