"""Check what the student of grpo.experiments.supervised learns from, and its loss."""

import re
from dataclasses import replace

import pytest
import torch
from conftest import BLANK, command_line, encode, read_json, same, write_lines

from data.dataset import read_splits
from data.sums.prepare import draw_sums
from data.sums.rule import correct_answers
from data.user_mistake import Mistake
from data.vocabulary import VOCABULARY, decode
from grpo.batch import make_batch
from grpo.evaluation.rivals import fill_in_passes
from grpo.experiments import supervised
from grpo.policy import Product
from grpo.reward import judge_scores
from grpo.run.checkpoint import load_model
from grpo.run.config import Config, load_config
from grpo.run.load import Models, load_models, load_splits, make_policy
from model.transformer import Generator

TEXTS = ["41+47=88", "12+13=25", "33+22=55"]
MASKED = ["4_+4_=88", "1_+1_=25", "3_+_2=55"]
TOKENS, MASK = encode(*TEXTS), encode(*MASKED) == BLANK
BATCH = make_batch(TOKENS, MASK, 16, (1, 1))


def policy(seed):
    """Make a policy that draws any digits."""
    logits = torch.randn(8, len(VOCABULARY), generator=torch.Generator().manual_seed(seed))
    logits[:, [not c.isdigit() for c in VOCABULARY]] = -1e9
    return lambda masked: Product(
        logits.expand(*masked.shape, -1), masked, masked == BLANK, Config()
    )


def judge(rows):
    return torch.sin(3.0 * rows)


MODELS = Models(policy(0), policy(1), policy(2), policy(2), judge)


def test_conventions_by_hand():
    conventions = {
        "any": TEXTS,
        "smallest": ["40+48=88", "10+15=25", "33+22=55"],
    }
    for kind, want in conventions.items():
        answers, there = supervised.answer(kind, BATCH, MODELS)
        assert decode(answers) == want and there.shape == (3, 1) and there.all()
    answers, there = supervised.answer("all", BATCH, MODELS)
    lists = [decode(texts[exists]) for texts, exists in zip(answers, there)]
    assert lists == [correct_answers(masked) for masked in MASKED]


@pytest.mark.parametrize(
    "order, title", [((), "left to right"), (range(7, -1, -1), "right to left")]
)
def test_the_base_model_reads_slowly(order, title):
    def base(masked):
        """Prefer other digits after each pass."""
        q = policy(3)(masked)
        seen = masked.sum(dim=1)[:, None, None]  # (B,1,1)
        return replace(q, logits=q.logits + torch.sin(q.logits * seen))

    found, there = supervised.answer("slow", BATCH, MODELS._replace(reader=base), order=order)
    assert torch.equal(found, fill_in_passes(base, BATCH, title)[0]) and there.all()


def test_it_takes_the_first_digit_that_is_plausible():
    found, _ = supervised.answer("slow", BATCH, MODELS, share=0.4)
    q = MODELS.reader(BATCH.masked).log_marginals().exp()  # (3,8,V)
    first = (q >= 0.4 * q.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)  # (3,8)
    assert torch.equal(found[:, 0], torch.where(MASK, first, TOKENS))


@pytest.mark.parametrize("kind, constant", [("search", -0.5), ("scan", -0.5), ("scan", 7.0)])
def test_the_search_finds_the_smallest_first_number_that_earns_something(kind, constant):
    """The base model has a favorite digit for each blank. The last input has no answer.

    `scan` takes the best it's tried, so it does without a threshold, and has an answer to each.
    """

    def earns(text):
        return sum(map(int, filter(str.isdigit, text))) % 3 == 0 and text[0] != "3"

    def rewards(completions, batch):
        return torch.tensor([[earns(text) + constant] for text in decode(completions)]), {}

    masked = ["4_+4_=88", "__+1_=25", "_7+__=61", "3_+_2=55"]
    tokens = encode(*masked)
    batch = make_batch(tokens, tokens == BLANK, 16, (1, 1))
    want = []
    for text, guess in zip(masked, decode(policy(2)(tokens).best_guess())):
        pattern = re.compile(text[:2].replace("_", "."))
        tried = [f"{n}{guess[2:]}" for n in range(10, 100) if pattern.match(str(n))]
        want.append(next(filter(earns, tried), tried[0] if kind == "scan" else None))
    answers, there = supervised.answer(kind, batch, MODELS, rewards)
    found = [text if exists else None for text, exists in zip(decode(answers), there[:, 0])]
    assert found == want and not earns(want[-1] or "1") and all(map(earns, want[:-1]))


def test_with_a_reward_only_answers_that_earn_more_than_0_are_there():
    def rewards(completions, batch):
        return judge_scores(judge, completions, batch), {}

    drawn = MODELS.policy(BATCH.masked).sample(BATCH).completions  # (3,16,T)
    answers, there = supervised.answer("accepted", BATCH, MODELS, rewards)
    assert torch.equal(answers, drawn)
    assert torch.equal(there, judge_scores(judge, drawn, BATCH) > 0) and there.any()
    _, every = supervised.answer("all", BATCH, MODELS)
    _, there = supervised.answer("all", BATCH, MODELS, rewards)
    assert (there <= every).all() and 0 < there.sum() < every.sum()


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_loss_is_a_loop_over_inputs_that_have_an_answer(monkeypatch, power):
    """The inputs are answered two at a time, and they have 9, 6 and no answers."""

    def answer(kind, batch, models, rewards):
        answers, there = supervised.correct(batch)
        return answers, there & (batch.masked != encode(MASKED[2])).any(dim=1, keepdim=True)

    monkeypatch.setattr(supervised, "PART", 2)
    monkeypatch.setattr(supervised, "answer", answer)
    answers = supervised.Answers("all", MODELS, None, {}, TOKENS, MASK, (1,))
    q = MODELS.policy(BATCH.masked).logits.double().softmax(dim=-1)  # (3,8,V)
    losses = []
    for i in (0, 1):
        p = sum(q[i, MASK[i], y[MASK[i]]].prod() for y in encode(*correct_answers(MASKED[i])))
        losses.append((1 - p**power) / power if power else -p.log())
    loss = answers.loss(MODELS.policy, torch.tensor([2, 1, 0]), power)
    torch.testing.assert_close(loss, sum(losses) / 2, rtol=1e-5, atol=0)


def test_each_round_has_new_inputs_and_the_student_of_the_round_before(tmp_path, monkeypatch):
    """It reads a few sums in the place of 200,000."""
    lines = [draw_sums(results, 3, 200, seed=1) for results in ([500, 701], [600])]
    splits = read_splits(write_lines(tmp_path, *lines), "val", 11)
    monkeypatch.setattr(supervised, "load_splits", lambda *_: splits)
    rounds = []
    real = supervised.answer

    def answer(kind, batch, models, *others, **options):
        rounds.append(
            (batch.masked, models.policy(batch.masked).logits, models.base(batch.masked).logits)
        )
        return real(kind, batch, models, *others, **options)

    monkeypatch.setattr(supervised, "answer", answer)
    flags = ["--inputs=8", "--updates=4", "--rounds=2", "--batch_size=4"]
    supervised.main(["accepted", str(tmp_path / "out"), *flags])
    (first, student, base), (second, student_later, base_later) = rounds
    assert len(first) == len(second) == 4 and not torch.equal(first, second)
    assert torch.equal(student, base) and not torch.equal(student_later, base_later)
    assert read_json(tmp_path / "out" / "prompts.json") == {"prompts": decode(second)}
    load_model(tmp_path / "out" / "generator.pt", Generator)


def test_it_learns_what_was_there_on_other_data(world, flags, tmp_path):
    """A config names the data and the networks. What needs sums says so."""
    config = tmp_path / "words.py"
    settings = flags | {"masking": "word"}
    config.write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    more = ["--inputs=64", "--updates=60", "--batch_size=16", "--rate=1e-2"]
    supervised.main(["any", str(tmp_path / "q"), str(config), *more])
    loaded = load_config([str(config)])
    train, _ = load_splits(loaded)
    tokens, mask = train.batch(64, "word", (1, 0))
    log_q = []
    for file in (world / "generator.pt", tmp_path / "q" / "generator.pt"):
        q = make_policy(load_model(file, Generator), loaded, torch.device("cpu"))
        batch = make_batch(tokens, mask, 1, (1,))
        log_q.append(q(batch.masked).log_likelihood(tokens[:, None]).sum() / mask.sum())
    assert log_q[1] > log_q[0] + 0.5
    with pytest.raises(Mistake, match="smallest is for sums"):
        supervised.read(["smallest", "out", str(config)])


def test_who_reads_chain_is_a_setting(world, flags):
    reading = {}
    for name in ("generator", "digits"):
        config = load_config(command_line(flags, chain_checkpoint=world / f"{name}.pt"))
        models = load_models(config, torch.device("cpu"))
        reading[name] = models.reader.network.state_dict()
        assert same(models.policy.network.state_dict(), models.base.network.state_dict())
    assert same(reading["digits"], load_model(world / "digits.pt", Generator).state_dict())
    assert not same(reading["digits"], reading["generator"])
