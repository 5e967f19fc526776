"""Is a finished run really better? Its table, all of it.

    python -m grpo.evaluation out                        # and writes its evaluation.json anew
    python -m grpo.evaluation out --eval_seed=1          # of other held-out inputs: only printed

Models, text and prompts are data. A reward's FILE.py is code: that a checkpoint names it is no
reason to run it, so it is named again.
"""

from pathlib import Path

from data.mistake import Mistake
from grpo.evaluation.evaluate import EVALUATION_SEED, format_table, hold_out, table
from grpo.plumbing.checkpoint import LATEST, read, training_state
from grpo.plumbing.config import Parser, exit_on_mistake, from_saved
from grpo.plumbing.load import (
    load_data,
    load_models,
    load_rewards,
    make_judge,
    make_policy,
    pick_device,
)
from grpo.plumbing.log import save_table


def main(argv=None):
    parser = Parser(prog="python -m grpo.evaluation", description="Print the table of a run.")
    parser.add_argument("out_dir", help="the run's folder")
    parser.add_argument("--device", help="by default the run's")
    parser.add_argument("--eval_inputs", help="how many held-out inputs, by default the run's")
    parser.add_argument("--eval_seed", type=int, default=EVALUATION_SEED, help="which of them")
    parser.add_argument("--reward", help="again, if the run's own is a FILE.py that you trust")
    with exit_on_mistake("evaluation"):
        args = parser.parse_args(argv)
        path = Path(args.out_dir) / LATEST
        saved = read(path)
        own = training_state(saved, path)["config"]
        if ".py:" in own["reward"] and not args.reward:
            raise Mistake(
                f"{path} names code as its reward; give it again if you trust it:"
                f" --reward={own['reward']}, or leave it out: --reward=judge"
            )
        given = {name: value for name, value in vars(args).items() if value and name in own}
        own |= {"reference_checkpoint": "", "kernel": "torch"}  # before: as the run began
        config = from_saved(own | given, path)
        device = pick_device(config.device)
        train, val = load_data(config.dataset, config.block_size, config.prompts_file)
        *generators, judge = load_models(config, train.vocabulary, saved)
        policy, before = (make_policy(model, device, config) for model in generators)
        judge = make_judge(judge, device, config)
        held_out = hold_out(config, train, val, device, args.eval_seed)
        rewards = load_rewards(config, judge, train.vocabulary, held_out.lexicon, device)
        result, completions = table(policy, before, judge, rewards, held_out, config)
        used = (args.eval_seed, config.eval_inputs, config.reward)
        if used == (EVALUATION_SEED, own["eval_inputs"], own["reward"]):
            save_table(args.out_dir, result, completions)
    print(format_table(result))


if __name__ == "__main__":
    main()
