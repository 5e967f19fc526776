"""Measure in a table whether a run is really better than the base model.

The base model is the generator before GRPO. A higher reward alone proves nothing, because the run
optimised it, and the default reward is the judge. The columns of the table prove more. But a lower
temperature alone improves most of them, so a run has to beat what the base model can do without
GRPO: its *argmax*, with a latent its draws with the *letters at 0*, where only the latent is
random, and its *best of 16*, where the judge chooses one of 16 draws for each word. Two rows are
cheats, which fill in words of the right length without a look at the context. No single column
gives both of them away. grpo/README.md#the-table says what each row and column is.

Shapes: N held-out inputs, n fills of each, T characters, V vocabulary.
"""

from dataclasses import dataclass

import torch
from tqdm import tqdm

from data.lexicon import hidden_spans, highlight, is_valid, lexicon
from data.per_word import mean_over_blanks, sum_over_words
from data.vocabulary import MASK_ID, decode
from grpo.batch import Batch, make_batch
from grpo.distributed import is_first
from grpo.evaluation.ngram import ngram, ngram_bits
from grpo.evaluation.rivals import (
    best_by_word,
    fill_blank_by_blank,
    fill_blindly,
    target,
    temper,
)
from grpo.latent_policy import Latent
from grpo.logprobs import expectation, log_softmax
from grpo.reward import log_odds

EVALUATION_SEED = 2**31  # the same for all runs, and larger than any run's own seed
SAMPLES = 16  # how many fills of each input we draw for the table
TEMPERATURES = (0.2, 0.6, 1.0)  # of the base model's draws
# With a latent they are pairs, the prior's temperature and the letters'. Rows of their own have the
# pairs (1, 1), "before, sampled", and (1, 0), "before, letters at 0".
PAIRS = ((1, 0.5), (0.5, 1), (0.5, 0), (0.25, 0))

COLUMNS = {  # {the name in evaluation.json: (the title in the table, decimal places)}
    "valid_words": ("valid", 3),
    "exact_words": ("exact", 3),
    "distinct_words": ("distinct", 3),
    "different_valid_words": ("in 16", 2),
    "ngram_bits": ("bits", 2),
    "nats": ("nats", 3),
    "pass@16": ("pass@16", 3),
}


@dataclass
class HeldOut:
    """Hold inputs that no run trains on, and the text and lexicon by which we measure fills."""

    batch: Batch  # N inputs, with the random numbers for 16 fills of each
    text: str  # the whole training split
    lexicon: set


def hold_out(config, train, val, device, seed=EVALUATION_SEED):
    """Draw held-out inputs with the run's own masking: -> `HeldOut`.

    The inputs depend on settings and on `seed` alone, so runs with different seeds are measured on
    the same inputs. But each has random numbers of its own for the blanks, so that the spread of
    their figures includes the luck of the draws.
    """
    hiding = (config.masking, config.mask_ratio, config.hidden_words)
    texts = val.batch(config.eval_inputs, *hiding, (seed, 0))  # each (N,T)
    batch = make_batch(*texts, SAMPLES, (seed, config.seed))
    (text,) = decode(torch.from_numpy(train.tokens))
    return HeldOut(batch.map(lambda x: x.to(device)), text, lexicon(text))


def opinions(judge, rewards, fills, batch):
    """Ask the judge and the rewards about fills (N,n,T): -> scores (N,n,T), {column: (N,n)}.

    A blank's score is the judge's log-odds that its word is from the text. For the column "judge"
    we turn these scores into probabilities, and average them over the blanks of each fill. Each
    part of the reward that is not the judge has a column "reward_NAME".
    """
    scores = log_odds(judge, fills, batch.words)  # (N,n,T)
    said = {"judge": mean_over_blanks(scores.sigmoid(), batch.mask)}  # (N,n)
    for name, (function, _) in rewards.parts.items():
        if name != "judge":
            values = function(fills, batch)  # (N,n) or (N,n,T)
            whole = values.shape == fills.shape[:2]
            said[f"reward_{name}"] = values if whole else mean_over_blanks(values, batch.mask)
    return scores, said


@torch.compiler.set_stance("force_eager")
def try_rewards(judge, rewards, held_out):
    """Score two texts, so that a faulty reward fails before the run begins."""
    few = held_out.batch[:2]
    fills = few.tokens[:, None].repeat(1, 3, 1)  # (2,3,T)
    opinions(judge, rewards, fills, few)


def measure(fills, held_out):
    """Compute the figures of fills (N,n,T): -> {name: number}.

    valid_words            the share of filled words that are in the lexicon
    exact_words            the share of filled words that equal the hidden word
    distinct_words         the number of different valid words in one fill of all inputs, divided by
                           the number of different hidden words: the mean over the n fills
    ngram_bits             how surprising a character near a blank is to a 5-gram model
    different_valid_words  if n > 1: the mean number of different valid fills of a hidden word
    pass@n                 if n > 1: the share of inputs that have a fill with all blanks right
    """
    n = fills.shape[1]
    batch = held_out.batch
    mask = batch.mask.cpu().numpy()  # (N,T)
    texts = decode(fills)
    hidden = []  # the hidden words
    valid = []  # of each valid word: which hidden word it fills, in which fill, and the word
    exact = 0
    for i, original in enumerate(decode(batch.tokens)):
        for start, end in hidden_spans(original, mask[i]):
            for j, text in enumerate(texts[i * n : (i + 1) * n]):
                exact += text[start:end] == original[start:end]
                if is_valid(text, start, end, held_out.lexicon):
                    valid.append((len(hidden), j, text[start:end]))
            hidden.append(original[start:end])
    total = max(len(hidden), 1)  # avoids 0 / 0 if no whole word is hidden
    distinct = {(j, word) for _, j, word in valid}
    probability = ngram(held_out.text, MASK_ID)
    figures = {
        "valid_words": len(valid) / (total * n),
        "exact_words": exact / (total * n),
        "distinct_words": len(distinct) / (max(len({*hidden}), 1) * n),
        "ngram_bits": ngram_bits(probability, mask, texts),
    }
    if n > 1:
        right = (fills == batch.tokens[:, None]).all(dim=-1)  # (N,n) visible text is always right
        figures[f"pass@{n}"] = right.any(dim=1).float().mean().item()
        figures["different_valid_words"] = len({(k, word) for k, _, word in valid}) / total
    return figures


def entropy(q):
    """Compute the mean entropy of the blanks of a policy, in nats."""
    log_p = log_softmax(q.marginal().logits[q.batch.mask], q.config.temperature)  # (blanks,V)
    return -expectation(log_p.exp(), log_p).mean().item()


def nats(q):
    """Compute −log q of the hidden text, per hidden letter, without truncation."""
    return -(q.log_prob(q.batch.tokens[:, None]).sum() / q.batch.mask.sum()).item()


def completion_lines(fills, said, held_out):
    """Make one dict for each fill: fills (N,n,T), said {name: (N,n)} -> a list of dicts.

    `said` is what the judge and the rewards said of the fills: one number per fill under each name.
    A dict holds the input of a fill, its text, and these numbers.
    """
    masked = held_out.batch.masked[:, None].expand(fills.shape)  # (N,n,T)
    inputs, texts = (decode(tokens) for tokens in (masked, fills))
    numbers = [[round(x, 6) for x in values.flatten().tolist()] for values in said.values()]
    names = ("input", "completion", *said)
    return [dict(zip(names, line)) for line in zip(inputs, texts, *numbers)]


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # compiling for these shapes takes longer than it saves
def evaluate(policy, before, judge, rewards, held_out, config, everything=False):
    """Compute the table: -> result, lines.

    `result` is {a row's title: {a column's name: number}}, for evaluation.json. `lines` is the list
    of dicts for completions.jsonl. `policy` maps a batch to a distribution over its fills, and so
    does `before`, the base model. With `everything`, a base model with a latent gets the row of the
    target, too, which doubles the time.
    """
    batch = held_out.batch
    result = {}
    bar = tqdm(desc="table", unit=" rows", leave=False, disable=not is_first() or None)

    def add(title, fills, **more):
        result[title] = measure(fills, held_out) | more
        bar.update()

    def draw(title, q, spell=1):
        fills = q.sample(batch.uniforms).completions  # (N,16,T)
        add(title, fills)
        if spell > 0:  # at temperature 0 hardly any text is possible
            result[title]["nats"] = nats(q)
        return fills

    def ask(title, fills):
        scores, said = opinions(judge, rewards, fills, batch)  # (N,n,T), {name: (N,n)}
        result[title] |= {name: values.mean().item() for name, values in said.items()}
        return scores, said

    def add_policy(name, q):
        fills = draw(f"{name}, sampled", q)
        result[f"{name}, sampled"]["entropy"] = entropy(q)
        add(f"{name}, argmax", q.at(1.0).best_guess()[:, None])
        if isinstance(q, Latent):
            draw(f"{name}, letters at 0", temper(q, 1, 0), 0)
        return fills, *ask(f"{name}, sampled", fills)

    add("the text", batch.tokens[:, None])
    ask("the text", batch.tokens[:, None])
    base = before(batch)
    fills, scores, _ = add_policy("before", base)
    add("before, best of 16", best_by_word(base.at(1.0), fills, scores))
    if isinstance(base, Latent):
        for choose, spell in PAIRS:
            title = f"before, temperatures {choose:g} and {spell:g}"
            draw(title, temper(base, choose, spell), spell)
    else:
        for temperature in TEMPERATURES:
            draw(f"before, temperature {temperature}", base.at(temperature))
    blanks = batch.mask.sum(dim=1).float().mean().item()
    for title, surest in {"one by one, drawn": False, "one by one, surest": True}.items():
        fills = fill_blank_by_blank(before, batch, config.seed, surest)
        add(title, fills, forward_passes=blanks)
    common, random, blind = fill_blindly(batch, held_out.text)
    add("cheat: common words", common)
    add("cheat: random words", random, nats=blind)
    if everything and isinstance(base, Latent):
        beta = 1 if config.direction == "forward" else config.kl_beta
        add("the target", target(base, judge, beta))
        for name in ("different_valid_words", "pass@16"):  # draws from 64 repeat
            del result["the target"][name]
    fills, _, said = add_policy("after", policy(batch))
    bar.close()
    return result, completion_lines(fills, said, held_out)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def peek(policy, held_out, step):
    """Show how the policy, which is the base model at step 0, fills three held-out texts.

    The first line has the share of valid words in all held-out texts, as in the table. The three
    texts have many long hidden words, because the blanks of a long word are the likeliest to clash.
    """
    batch = held_out.batch
    fills = policy(batch).sample(batch.uniforms).completions  # (N,16,T)
    valid = measure(fills, held_out)["valid_words"]
    length = sum_over_words(batch.mask[:, None].float(), batch.words)[:, 0]  # (N,T) word lengths
    shown = length.sum(dim=1).argsort(descending=True, stable=True)[:3].tolist()
    texts = {"now": decode(fills[:, 0])}
    if step == 0:
        texts = {"text": decode(batch.tokens), "before": texts["now"]}
    lines = [f"step {step}: valid words on held-out text {valid:.3f}"]
    for i in shown:
        blanks = batch.mask[i].tolist()
        lines += [f"  {name:7s}{highlight(each[i], blanks)}" for name, each in texts.items()]
    return "\n".join(lines)


def aligned(rows):
    """Pad the cells of each column to one width, and join each row into a line of text."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def cell(values, digits):
    """Format the mean of `values`, ± half of the gap between the largest and the smallest: -> str.

    No values give an empty cell. The ± is left out where it rounds to 0.
    """
    if not values:
        return ""
    mean = f"{sum(values) / len(values):.{digits}f}"
    half = f"{(max(values) - min(values)) / 2:.{digits}f}"
    return f"{mean} ± {half}" if float(half) else mean


def format_rows(rows, columns=COLUMNS):
    """Format {title: [the row of each run]}, with a `cell` for each column: -> lines of text.

    Each part of a run's reward except `judge` adds a column, named "reward_NAME" in the rows.
    """
    names = dict.fromkeys(name for of_runs in rows.values() for row in of_runs for name in row)
    parts = {name: (name.removeprefix("reward_"), 3) for name in names if "reward_" in name}
    columns = columns | ({"judge": ("judge", 3)} if parts else {}) | parts
    lines = [["filled by", *(title for title, _ in columns.values())]]
    for title, of_runs in rows.items():
        cells = []
        for name, (_, digits) in columns.items():
            values = [row[name] for row in of_runs if name in row]
            cells.append(cell(values, digits))
        lines.append([title, *cells])
    return aligned(lines)


def format_table(result):
    """Format the dict of evaluation.json as a table: -> str.

    The base model at other temperatures is left out.
    """
    rows = {title: [row] for title, row in result.items() if "temperature" not in title}
    lines = format_rows(rows)
    if result["after, sampled"]["judge"] > result["the text"]["judge"]:
        lines.append("the judge prefers these fills to the original text: it is being fooled")
    return "\n".join([*lines, "what the columns are: grpo/README.md#the-table"])
