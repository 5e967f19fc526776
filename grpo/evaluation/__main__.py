"""Print the table of a finished run, or check in other ways whether GRPO made its policy better.

    python -m grpo.evaluation out                        # prints the table that the run made
    python -m grpo.evaluation out --again                # computes the table anew, and keeps it
    python -m grpo.evaluation out --eval_seed=1          # takes other inputs, and keeps nothing
    python -m grpo.evaluation out --temperatures         # shows the base model at low temperatures
    python -m grpo.evaluation out --judges=A.pt,B.pt     # asks these judges about the fills, too
    python -m grpo.evaluation out --fresh_judge          # trains two new judges on the draws

A checkpoint may name a FILE.py as its reward. We do not run a file just because a checkpoint names
it, so you have to name the file again with --reward.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from data.per_word import mean_over_blanks
from data.user_mistake import refuse
from grpo.distributed import pick_device
from grpo.evaluation.evaluate import (
    COLUMNS,
    EVALUATION_SEED,
    ROWS,
    aligned,
    format_table,
    hold_out,
    measure,
    table,
)
from grpo.latent_policy import Latent
from grpo.plumbing.checkpoint import LATEST, find, load_model, read, training_state
from grpo.plumbing.command_line import Parser, exit_on_mistake
from grpo.plumbing.config import Config, from_saved
from grpo.plumbing.load import load_data, load_models, load_rewards
from grpo.plumbing.log import save_table
from grpo.policy import Policy, make_judge
from grpo.product_policy import Product
from grpo.reward import log_odds
from model.losses import judge_loss
from model.pretrain import Settings, fit
from model.report import auc, held_out_batch, word_scores

CHOOSE = (1.0, 0.5, 0.25)  # temperatures of a latent's prior
SPELL = (1.0, 0.5, 0.001)  # temperatures of the letters; the last is in effect argmax
FRESH_STEPS = 400  # steps that --fresh_judge trains each judge for
SHORT_THREE = 3  # index of the entry in `model.report.TESTS` that hides three short words


class FinishedRun:
    """This loads the settings, models and data of a finished run."""

    def __init__(self, args):
        path = Path(args.out_dir) / LATEST
        saved = read(path)
        self.own = training_state(saved, path)["config"]
        refuse(
            ".py:" in self.own["reward"] and not args.reward,
            f"{path} has a reward that executes a file, so the command must name the reward; if you"
            f" trust the file, add --reward={self.own['reward']}, otherwise --reward=judge",
        )
        given = {name: value for name, value in vars(args).items() if value and name in self.own}
        # We clear reference_checkpoint, so that the base model is the one that GRPO started from.
        # We use PyTorch, because the kernel that the run used may not work on this device.
        began = {"reference_checkpoint": "", "kernel": "torch"}
        self.config = from_saved(self.own | began | given, path)
        self.device = pick_device(self.config.device)
        config, device = self.config, self.device
        self.train, self.val = load_data(config.dataset, config.block_size, config.prompts_file)
        vocabulary = self.train.vocabulary
        generator, self.base, judge = load_models(config, vocabulary, saved)
        self.policy = Policy(generator, config, device)
        self.before = Policy(self.base, config, device)
        self.judge = make_judge(judge, config, device)
        self.held_out = hold_out(config, self.train, self.val, device, args.eval_seed)
        lexicon = self.held_out.lexicon
        self.rewards = load_rewards(config, self.judge, vocabulary, lexicon, device)


def make_table(run, args):
    """Compute the table: -> its text. Save it if it uses the run's own inputs and reward."""
    parts = (run.policy, run.before, run.judge, run.rewards, run.held_out, run.config)
    result, completions = table(*parts)
    used = (args.eval_seed, run.config.eval_inputs, run.config.reward)
    if used == (EVALUATION_SEED, run.own["eval_inputs"], run.own["reward"]):
        save_table(args.out_dir, result, completions)
    return format_table(result)


def tempered(q, choose, spell):
    """Return q with its prior's logits divided by `choose`, and its letters' logits by `spell`.

    Both numbers are temperatures. A `Product` has no prior, so there `choose` does nothing.
    """
    if isinstance(q, Product):
        return Product(q.logits / spell, q.batch, q.sampling)
    return Latent(q.prior / choose, q.letters / spell, q.batch, q.sampling)


@torch.no_grad()
def temperatures(run):
    """Return a table that compares the run's policy with the base model at several temperatures."""
    batch = run.held_out.batch
    base = run.before(batch)
    fills = {"after": run.policy(batch)}
    for choose in CHOOSE if run.base.n_latent > 1 else CHOOSE[:1]:
        for spell in SPELL:
            fills[f"before, choose {choose:g}, spell {spell:g}"] = tempered(base, choose, spell)
    rows = {
        name: measure(q.sample(batch.uniforms).completions, run.held_out)
        for name, q in fills.items()
    }
    shown = [name for name in COLUMNS if name in rows["after"]]
    cells = [["", *(COLUMNS[name] for name in shown)]]
    for title, row in rows.items():
        cells.append([title, *(f"{row[name]:.3f}" for name in shown)])
    return "\n".join(aligned(cells))


@torch.no_grad()
def judges(run, files):
    """Return a table of P(real), the probability that a judge gives to a word being real text.

    The judges are the run's own judge and those in `files`.
    """
    batch = run.held_out.batch
    fills = {
        "the text": batch.tokens[:, None],
        "before": run.before(batch).sample(batch.uniforms).completions[:, :2],
        "after": run.policy(batch).sample(batch.uniforms).completions[:, :2],
    }
    all_of_them = {run.config.judge_checkpoint: run.judge}
    for file in files:
        judge = load_model(file, "judge", run.train.vocabulary).requires_grad_(False)
        all_of_them[file] = make_judge(judge, run.config, run.device)
    cells = [["P(real), says", *fills]]
    for name, judge in all_of_them.items():
        said = [log_odds(judge, x, batch.words).sigmoid() for x in fills.values()]
        cells.append([name, *(f"{mean_over_blanks(x, batch.mask).mean():.3f}" for x in said)])
    return "\n".join(aligned(cells))


def fresh_judge(run, scratch):
    """Train one judge on the base model's draws and one on the policy's, and show each one's AUC.

    Both judges start from the default judge_checkpoint and learn for FRESH_STEPS steps. Then each
    judge is tested on words of held-out text, and on new draws by the model whose draws it has
    seen. Its AUC says how well it tells the draws from the text.
    """
    lines = []
    for when, policy in {"before": run.before, "after": run.policy}.items():
        judge = load_model(Config.judge_checkpoint, "judge", run.train.vocabulary)
        score = make_judge(judge, run.config, run.device)
        args = Settings(
            judge_masking=run.config.masking, block_size=run.config.block_size, out_dir=scratch
        )

        def loss(step):
            return judge_loss(score, policy, run.train, args, 1.0, (11, 1, step))  # noqa: B023

        fit(f"fresh_judge_{when}", judge, loss, FRESH_STEPS, 1e-3, args)
        batch = held_out_batch(run.val, run.config.block_size, SHORT_THREE)
        real, drawn, _ = word_scores(policy, score, batch)
        lines.append(f"{when}: a fresh judge has an AUC of {auc(real, drawn):.3f}")
    return "\n".join([*lines, "0.5 means that it cannot tell the draws from the text"])


def stored(out_dir):
    """Return the text of the table that a run has made. Raises a Mistake if there is none."""
    path = find(out_dir) / "evaluation.json"
    again = f"compute the table: python -m grpo.evaluation {out_dir} --again"
    refuse(
        not path.exists(),
        f"{path} is missing, because the run has not ended, or {out_dir} is not a run's folder;"
        f" name another folder, or {again}",
    )
    result = json.loads(path.read_text())
    refuse(
        not {*ROWS} <= {*result},
        f"{path} lacks rows of the table, so another version of the program wrote it; {again}",
    )
    return format_table(result)


def main(argv=None):
    parser = Parser(prog="python -m grpo.evaluation", description="Print the table of a run.")
    add = parser.add_argument
    add("out_dir", help="the run's folder")
    add("--again", action="store_true", help="compute the table again, and save it")
    seed_help = "a number that chooses the held-out inputs"
    add("--eval_seed", type=int, default=EVALUATION_SEED, help=seed_help)
    add("--eval_inputs", help="number of held-out inputs; default: as many as in the run")
    add("--temperatures", action="store_true", help="show the base model at other temperatures")
    judges_help = "show P(real) by the run's judge and by FILE,FILE; own: by the run's judge only"
    add("--judges", help=judges_help)
    fresh_help = "train two new judges on the draws, which takes some minutes"
    add("--fresh_judge", action="store_true", help=fresh_help)
    reward_help = "measure this reward; if the run's reward is a FILE.py that you trust, repeat it"
    add("--reward", help=reward_help)
    add("--device", help="device to compute on; default: the run's device")
    with exit_on_mistake("evaluation"):
        args = parser.parse_args(argv)
        refuse(args.eval_seed < 0, f"--eval_seed={args.eval_seed} is not allowed; give 0 or more")
        other_inputs = args.eval_seed != EVALUATION_SEED or args.eval_inputs
        asks = args.temperatures or args.judges or args.fresh_judge
        if not (args.again or other_inputs or args.reward or asks):
            print(stored(args.out_dir))
            return
        run = FinishedRun(args)
        if args.temperatures:
            print(temperatures(run))
        elif args.judges:
            print(judges(run, [file for file in args.judges.split(",") if file != "own"]))
        elif args.fresh_judge:
            with TemporaryDirectory() as scratch:
                print(fresh_judge(run, scratch))
        else:
            print(make_table(run, args))


if __name__ == "__main__":
    main()
