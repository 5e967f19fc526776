"""Is it really better? Numbers that neither the judge nor the loss sees, on held-out text.

    python -m grpo.evaluate out                        # the table of the run in `out`, all of it
    python -m grpo.evaluate out --eval_seed=1          # on other held-out inputs; only printed

Letters: N held-out inputs, n fills of each, T characters, V vocabulary, K values of the latent.
Reward alone proves nothing: it is what was optimised. And a low temperature alone raises most
figures, so the row to beat is the *argmax* of the untouched generator; and the judge's choice among
16 of its fills, which is what GRPO's reward can do without any training.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from data.masking import parse_masking
from grpo.baselines import AT_ONCE, best_by_run, fill_in_passes, price_of_independence
from grpo.figures import pass_at_k, word_figures
from grpo.fill import find
from grpo.mixture import draw, likeliest, log_marginal, log_prob
from grpo.plumbing.checkpoint import LATEST, read, training_state, write
from grpo.plumbing.config import Parser, convert, exit_on_mistake, from_saved
from grpo.plumbing.distributed import is_first
from grpo.plumbing.log import highlight
from grpo.plumbing.setup import forward, load_data, load_models, pick_device
from grpo.referee import ngram, ngram_bits
from grpo.reward import Rewards, judge_scores, mean_over_input, parse_reward
from grpo.rollout import as_policy, draw_uniforms, in_batches
from grpo.sampling import options
from grpo.stats import expectation, log_softmax, where_blank
from grpo.table import ROWS, SHORT_COLUMNS, SHORT_ROWS, format_table, gap_closed
from grpo.words import decode, lexicon

SAMPLES = 16  # fills per input where fills are sampled
EVALUATION_SEED = 2**31  # no run's own seed: every run is evaluated on the same inputs
PEEK = 64  # inputs of a look in passing
BLANK_BY_BLANK = 1 << 20  # passes: more than an input has blanks
PASSES = {f"reference_steps_{passes}": passes for passes in (2, 3, 4, 6)} | {
    "reference_sequential_random": BLANK_BY_BLANK,
    "reference_sequential_confident": BLANK_BY_BLANK,
}
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)  # at which the generator as the run began is drawn from


class Evaluation:
    """Fixed held-out inputs at the run's own maskings and sampling settings, and their figures."""

    def __init__(self, config, judge, train, val, device, seed=EVALUATION_SEED):
        self.config = config
        self.seed = seed
        self.vocabulary = train.vocabulary
        self.text = train.decode(train.tokens)
        self.words = lexicon(self.text)
        self.bar = tqdm(disable=True)
        self.judge = self.watched(judge)
        N = config.eval_inputs
        T = config.block_size
        tokens, mask = val.batch(
            N, T, parse_masking(config.masking), config.mask_ratio, config.hidden_words, (seed, 0)
        )  # (N,T), (N,T)
        self.tokens = tokens.to(device)
        self.mask = mask.to(device)
        self.masked = self.tokens.masked_fill(self.mask, train.mask_id)  # (N,T)
        self.uniforms = draw_uniforms(N, SAMPLES, T, (seed, 1)).to(device)  # (N,n,T)
        self.z_uniforms = draw_uniforms(N, SAMPLES, 1, (seed, 2)).squeeze(2).to(device)  # (N,n)
        # What peeks and completions.jsonl show; the table is of held-out text in any case, since
        # nobody knows what the blanks of a prompt should hold.
        self.shown = (self.tokens, self.masked, self.mask)
        if config.prompts_file:
            prompts = train.prompts[:N].to(device)  # (P,T)
            self.shown = (prompts, prompts, prompts == train.mask_id)
        self.rewards = Rewards(judge, config, self.vocabulary, self.words, device)
        # A mistake in them is found now, before anything is written.
        few = self.tokens[:2, None].repeat(1, 3, 1)  # (2,3,T)
        self.own_rewards(few, self.masked[:2], self.mask[:2])

    def watched(self, model):
        """`model`, which moves the table's bar whenever it is called: no long silence."""

        def call(tokens):
            self.bar.refresh()
            return model(tokens)

        return call

    def own_rewards(self, fills, masked, mask):
        """What each part of the reward but the judge says of whole fills: {name: (N,n)}."""
        said = {}
        for name in self.rewards.names:
            if name != "judge":
                values = self.rewards.score(name, fills, masked, mask)  # (N,n) or (N,n,T)
                whole = mean_over_input(values, masked) if values.dim() == 3 else values
                said[name] = whole  # (N,n)
        return said

    def sample(self, logits, masked, mask, **changes):
        """SAMPLES fills of each input, always from the same uniforms: (N·K,T,V) -> (N,n,T)."""
        uniforms = self.uniforms[: len(masked)]  # (N,n,T)
        z_uniforms = self.z_uniforms[: len(masked)]  # (N,n)
        how = options(self.config) | changes
        return draw(logits, masked, mask, uniforms, z_uniforms, how)  # (N,n,T)

    def count_words(self, fills):
        """Fills (N,n,T) of all the inputs, or of the first ones -> {name: number}."""
        tokens = self.tokens[: len(fills)]  # (N,T)
        return word_figures(tokens, self.mask, fills, self.vocabulary, self.words)

    def texts(self, tokens):
        """(...,T) -> a flat list of strings, without the padding behind a short prompt."""
        lengths = (tokens >= 0).sum(dim=-1).flatten().tolist()
        return [text[:end] for text, end in zip(decode(tokens, self.vocabulary), lengths)]

    def measure(self, fills, forward_passes, scores=None):
        """All figures of fills (N,n,T); the judge's `scores` of them (N,n,T) may be known."""
        if scores is None:
            scores = judge_scores(self.judge, fills)  # (N,n,T)
        n = fills.shape[1]
        right = (fills == self.tokens[:, None]) | ~self.mask[:, None]  # (N,n,T)
        wrong_chars = (~right).sum().item() / (self.mask.sum().item() * n)
        probability = ngram(self.text, len(self.vocabulary) - 1)
        figures = self.count_words(fills) | {
            "judge": scores.mean(dim=-1).mean().item(),
            "exact_chars": 1 - wrong_chars,
            "ngram_bits": ngram_bits(probability, self.mask, self.texts(fills)),
            "forward_passes": forward_passes,
        }
        if n == SAMPLES:
            solved = right.all(dim=-1).sum(dim=1).tolist()  # (N,)
            for k in (1, 2, 4, 8, 16):
                figures[f"pass@{k}"] = pass_at_k(solved, n, k)
        return figures

    def exact_figures(self, log_p, ref_log_p):
        """From the probabilities themselves, in nats: log_p, ref_log_p (N·K,T,V) -> {name: number}.

        Given z, and then the mean over z: `entropy` of a blank, and of whole inputs the entropy and
        the KL. Of the mixture: the entropy of a blank's marginal, and log q(original text), whose
        mean exponential is the pass@1 that endless untruncated sampling would find.
        """
        N = len(self.mask)
        K = len(log_p) // N

        def at_blanks(log_p, values):
            """Σ_v p(v) values(v), 0 wherever there is no blank: (N·K,T,V) -> (N·K,T)."""
            mask = self.mask.repeat_interleave(len(log_p) // N, dim=0)  # (N·K,T)
            return where_blank(expectation(log_p.exp(), values).squeeze(-1), mask)

        entropy = at_blanks(log_p, -log_p)  # (N·K,T)
        kl = at_blanks(log_p, log_p - ref_log_p)  # (N·K,T)
        log_m = log_marginal(log_p, N)  # (N,T,V)
        of_marginal = at_blanks(log_m, -log_m)  # (N,T)
        blanks = self.mask.sum()
        original = log_prob(log_p, self.tokens[:, None], self.mask)  # (N,1)
        figures = {
            "entropy": entropy.sum() / (K * blanks),
            "entropy_marginal": of_marginal.sum() / blanks,
            "sequence_entropy": entropy.sum(dim=1).mean(),
            "sequence_kl": kl.sum(dim=1).mean(),
            "original_log_prob": original.mean(),
            "original_prob": original.exp().mean(),
        }
        return {name: value.item() for name, value in figures.items()}

    def at_temperatures(self, logits):
        """What a lower temperature trades: the words of one step's fills at each."""
        rows = []
        for temperature in TEMPERATURES:
            fills = self.sample(logits, self.masked, self.mask, temperature=temperature)  # (N,n,T)
            rows.append({"temperature": temperature} | self.count_words(fills))
        return rows

    def one_step(self, name, logits, ref_logits):
        """The rows NAME_sample, NAME_argmax, NAME_best_of_16, from one forward pass's logits.

        -> rows, the samples (N,n,T) and what each reward says of them {: (N,n)}.
        Best of 16: the judge reads the samples as they are, and each run of blanks takes the fill
        that it likes best there; one forward pass, and 16 of the judge's.
        """
        log_p = log_softmax(logits, self.config.temperature)  # (N·K,T,V)
        ref_log_p = log_softmax(ref_logits, self.config.temperature)  # (N·K,T,V)
        fills = self.sample(logits, self.masked, self.mask)  # (N,n,T)
        scores = judge_scores(self.judge, fills)  # (N,n,T)
        sampled = self.measure(fills, 1, scores)
        sampled |= self.exact_figures(log_p, ref_log_p)
        said = self.own_rewards(fills, self.masked, self.mask)
        for part, values in said.items():
            sampled[f"reward_{part}"] = values.mean().item()
        argmax = likeliest(logits, self.masked, self.mask, self.config.temperature)  # (N,1,T)
        best = best_by_run(fills, scores, self.mask)  # (N,1,T)
        rows = {
            f"{name}_sample": sampled,
            f"{name}_argmax": self.measure(argmax, 1),
            f"{name}_best_of_16": self.measure(best, 1) | {"judge_passes": SAMPLES},
        }
        return rows, fills, {"judge": scores.mean(dim=-1)} | said

    @torch.no_grad()
    def table(self, policy, before):
        """Every row, of `policy` and of the generator as the run began -> rows, completions."""
        models = {"before": self.watched(before), "after": self.watched(policy)}
        disable = None if is_first() else True  # None: where stderr is no terminal
        steps = 2 * len(models) + 1 + len(PASSES)
        with tqdm(total=steps, leave=False, dynamic_ncols=True, disable=disable) as self.bar:
            rows = {"original": self.measure(self.tokens[:, None], 0)}
            logits = {}  # (N·K,T,V) each
            prices = {}
            for name, model in models.items():
                self.begin(f"{name}, one step")
                logits[name] = in_batches(model, self.masked, AT_ONCE)  # (N·K,T,V)
                of_one_step, fills, said = self.one_step(name, logits[name], logits["before"])
                rows |= of_one_step
                self.begin("the price of independence")
                prices[name] = price_of_independence(
                    model,
                    logits[name],
                    self.tokens,
                    self.masked,
                    self.mask,
                    self.vocabulary,
                    self.config.temperature,
                )
            self.begin("before, at other temperatures")
            temperatures = self.at_temperatures(logits["before"])
            for name, passes in PASSES.items():
                self.begin(ROWS[name])
                filled = fill_in_passes(
                    models["before"],
                    logits["before"],
                    self.masked,
                    self.mask,
                    passes,
                    self.config,
                    surest=name == "reference_sequential_confident",
                )  # (N,1,T)
                used = self.mask.sum(dim=1).clamp(max=passes).float().mean().item()
                rows[name] = self.measure(filled, used)
            if self.config.prompts_file:
                fills, said = self.of_prompts(models["after"])
        config = self.config
        inputs = torch.stack([self.tokens, self.mask.long()]).cpu().numpy()  # (2,N,T)
        digest = hashlib.sha256(inputs.tobytes()).hexdigest()
        beside = {
            "gap_closed": gap_closed(rows),
            "before_at_temperatures": temperatures,
            "price_of_independence": prices,
            "n_latent": len(logits["before"]) // len(self.mask),
            "masking": config.masking,
            "inputs": len(self.masked),
            "temperature": config.temperature,
            "seed": config.seed,
            "eval_seed": self.seed,
            "held_out": digest[:12],  # equal for runs with the same held-out inputs
        }
        return rows | beside, self.completions(fills, said)

    def begin(self, name):
        """The next step of the table, on its bar."""
        self.bar.update()
        self.bar.set_description(f"table: {name}")

    @torch.no_grad()
    def of_prompts(self, policy):
        """Samples of the user's own prompts, and what each reward says: (P,n,T), {name: (P,n)}."""
        _, masked, mask = self.shown
        fills = self.sample(in_batches(policy, masked, AT_ONCE), masked, mask)  # (P,n,T)
        scores = judge_scores(self.judge, fills)  # (P,n,T)
        said = {"judge": mean_over_input(scores, masked)}
        return fills, said | self.own_rewards(fills, masked, mask)

    def completions(self, fills, said):
        """Every single fill with its rewards: fills (N,n,T), {name: (N,n)} -> a list of dicts."""
        _, masked, _ = self.shown
        inputs = self.texts(masked)
        said = {name: values.flatten().tolist() for name, values in said.items()}
        lines = []
        for row, text in enumerate(self.texts(fills)):
            line = {"input": inputs[row // fills.shape[1]], "completion": text}
            lines.append(line | {name: round(values[row], 6) for name, values in said.items()})
        return lines

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # shapes of their own are not worth compiling for
    def peek(self, policy, before, step):
        """A look in passing: valid words on the first inputs, and a few fills before and now."""
        masked = self.masked[:PEEK]  # (N,T)
        mask = self.mask[:PEEK]  # (N,T)
        original, few, blanks = (x[:5] for x in self.shown)  # (5,T)
        texts = {"text": self.texts(original)}
        valid = []
        for name, model in {"before": before, "now": policy}.items():
            fills = self.sample(model(masked), masked, mask)  # (N,n,T)
            valid.append(f"{self.count_words(fills)['valid_words']:.2f} {name}")
            fills = self.sample(model(few), few, blanks)  # (5,n,T)
            texts[name] = self.texts(fills[:, 0])
        lines = [f"step {step}: valid words on held-out text {', '.join(valid)}"]
        for i, flags in enumerate(blanks.tolist()):
            for name, each in texts.items():
                lines.append(f"  {name:7s}" + highlight(each[i], flags))
        return "\n".join(lines)

    @torch.compiler.set_stance("force_eager")
    def finish(self, policy, before):
        """Write evaluation.json and completions.jsonl, every fill of `after_sample`.

        -> the table, as text, within 80 characters
        """
        result, completions = self.table(policy, before)
        self.write(result, completions)
        return format_table(result, SHORT_ROWS, SHORT_COLUMNS)

    def write(self, result, completions):
        out = Path(self.config.out_dir)
        lines = [json.dumps(line, allow_nan=False) + "\n" for line in completions]
        write(out / "completions.jsonl", "".join(lines).encode())
        write(out / "evaluation.json", json.dumps(result, indent=1, allow_nan=False).encode())


def allowed_reward(saved, given):
    """The reward to evaluate with, {part: weight}; says what of the saved one it leaves out.

    A checkpoint may name files. Models, text and prompts are read as data; a reward's FILE.py is
    code, and runs only where the flag --reward names it again.
    """
    parts = {name: weight for name, weight in saved.items() if ".py:" not in name}
    if given:
        parts = parse_reward(given)
    for name in saved:
        if ".py:" in name and name not in parts:
            print(
                f"left out: {name}, code that a checkpoint names; take it in with --reward={name}"
            )
    return parts or parse_reward("judge")


def arguments(argv):
    parser = Parser(
        prog="python -m grpo.evaluate",
        description="Print the table of a run, all of it, and write its evaluation.json;"
        " a table of other inputs is only printed.",
    )
    parser.add_argument("out_dir", help="a folder with checkpoint.pt")
    parser.add_argument("--device", help="by default the run's own")
    parser.add_argument("--eval_inputs", help="held-out inputs, by default as many as in the run")
    parser.add_argument(
        "--eval_seed",
        type=int,
        default=EVALUATION_SEED,
        help=f"which held-out inputs; {EVALUATION_SEED} are those of every run's table",
    )
    parser.add_argument(
        "--reward", help="rewards of your own, as in the run: a checkpoint's FILE.py is not run"
    )
    parser.add_argument("--json", metavar="FILE", help="write the table there")
    args = parser.parse_args(argv)
    if args.eval_seed < 0:
        raise ValueError(f"eval_seed={args.eval_seed} is not allowed; it takes 0 or more")
    return args


def main(argv=None):
    with exit_on_mistake("evaluate"):
        args = arguments(argv)
        file = Path(args.out_dir) / LATEST
        saved = read(file)
        config = from_saved(training_state(saved, file)["config"], str(file))
        inputs = convert("eval_inputs", args.eval_inputs or config.eval_inputs, "command line")
        own_reward = parse_reward(config.reward)
        reward = allowed_reward(own_reward, args.reward)
        own = (config.eval_inputs, own_reward, EVALUATION_SEED)
        its_own = (inputs, reward, args.eval_seed) == own
        config = replace(
            config,
            out_dir=args.out_dir,
            eval_inputs=inputs,
            reward=",".join(f"{name}:{weight}" for name, weight in reward.items()),
            generator_checkpoint=find(config.generator_checkpoint),
            judge_checkpoint=find(config.judge_checkpoint),
            reference_checkpoint="",  # before is what the run began with
            reference_mode="static",
            compile="false",
        )
        device = pick_device(args.device or config.device)
        meta = find(Path("data") / config.dataset / "meta.json")
        dataset = str(meta.parent.resolve()) if meta.exists() else config.dataset
        train, val = load_data(dataset, config.block_size, config.prompts_file)
        *generators, judge, _ = load_models(config, train.vocabulary, saved)
        policies = [as_policy(model.to(device), device, config) for model in generators]
        judge = forward(judge.to(device), device, config)
        evaluation = Evaluation(config, judge, train, val, device, args.eval_seed)
        result, completions = evaluation.table(*policies)
        if its_own:
            evaluation.write(result, completions)
        if args.json:
            write(args.json, json.dumps(result, indent=1, allow_nan=False).encode())
        print(format_table(result))


if __name__ == "__main__":
    main()
