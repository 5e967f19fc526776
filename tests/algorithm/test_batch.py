"""Check how inputs are drawn and split into batches, and how their blanks form words.

Shapes: B inputs, T characters, G completions of each, M blanks of all inputs.
"""

from dataclasses import dataclass, is_dataclass, replace

import pytest
import torch

from data import per_word
from data.dataset import read_dataset
from data.vocabulary import MASK_ID
from grpo.batch import Batch, Rows, draw_batch, draw_uniforms, make_batch, minibatches
from grpo.policy import LogProbs
from grpo.run.config import Config

B, G, T = 7, 3, 5


@dataclass(frozen=True)
class Nested(Rows):
    batch: Batch
    old: LogProbs
    reward: torch.Tensor


def nested(seed=(1, 0)):
    """Make rows in which every number that belongs to input b equals b."""

    def own(*shape):
        return torch.arange(B).view(B, *[1] * len(shape)).expand(B, *shape)

    batch = Batch(*[own(T)] * 4, own(G, T), own(G, T), own(T), seed)
    old = LogProbs(own(G, T), own(G, T), own(T), own(T))
    return Nested(batch, old, own(G, T))


def tensors(record):
    """List every tensor of a record, also of the records inside it."""
    found = []
    for value in vars(record).values():
        found += tensors(value) if is_dataclass(value) else [value]
    return [x for x in found if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(
    "rows, want",
    [
        (slice(2, 4), [2, 3]),
        (torch.tensor([5, 0, 3]), [5, 0, 3]),
    ],
)
def test_rows_of_a_record_are_rows_of_everything_in_it(rows, want):
    whole = nested()
    part = whole[rows]
    assert len(tensors(part)) == 7 + 4 + 1
    for x in tensors(part):
        assert x.flatten(1)[:, 0].tolist() == want
    assert all(map(torch.equal, tensors(part.batch), tensors(whole.batch[rows])))
    assert part.batch.seed == (1, 0)


def test_every_epoch_takes_every_input_once_in_an_order_of_its_own():
    batch = nested().batch

    def order(batch, epoch, size=3):
        return [rows.tolist() for rows in minibatches(batch, epoch, Config(minibatch_size=size))]

    assert order(batch, 0, size=0) == order(batch, 1, size=0) == [list(range(B))]
    orders = [order(batch, epoch) for epoch in range(3)]
    for parts in orders:
        assert [len(part) for part in parts] == [3, 3, 1]
        assert sorted(sum(parts, [])) == list(range(B))
    other = order(replace(batch, seed=(1, 1)), 0)
    different = [*orders, other, [list(range(B))]]
    assert len({str(sum(parts, [])) for parts in different}) == len(different)
    assert order(nested().batch, 2) == orders[2], "an epoch's order is a function of the seed"


def noise(batch):
    return batch.noise(T)


def draw_share(data, config, monkeypatch, processes=1, rank=0, step=3):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("RANK", str(rank))
    return draw_batch(data, config, step, "cpu")


def test_processes_share_the_inputs_of_a_step(world, monkeypatch):
    """Three processes together draw the inputs that one process draws alone."""
    data = read_dataset(world / "text" / "train.txt", 16)
    shared = {"batch_size": 2, "group_size": 4, "block_size": 16, "masking": "word"}
    whole = draw_share(data, Config(**shared, gradient_accumulation_steps=3), monkeypatch)
    shares = [draw_share(data, Config(**shared), monkeypatch, 3, rank) for rank in range(3)]
    for name in ("tokens", "masked", "mask", "words", "uniforms"):
        together = torch.cat([getattr(share, name) for share in shares])
        assert torch.equal(together, getattr(whole, name)), name
    for draw in (Batch.latent_uniforms, Batch.coins, noise):
        assert torch.equal(torch.cat([draw(share) for share in shares]), draw(whole))
        assert torch.equal(draw(whole[4:]), draw(whole)[4:])


def test_inputs_are_a_function_of_seed_and_step(world, monkeypatch):
    data = read_dataset(world / "text" / "train.txt", 16)
    config = Config(batch_size=4, group_size=4, block_size=16, masking="word", seed=5)
    once = draw_share(data, config, monkeypatch)
    again = draw_share(data, config, monkeypatch)
    others = [
        draw_share(data, config, monkeypatch, step=4),
        draw_share(data, replace(config, seed=6), monkeypatch),
    ]
    assert all(map(torch.equal, tensors(once), tensors(again)))
    for other in others:
        assert not torch.equal(once.tokens, other.tokens)
        assert not torch.equal(once.uniforms, other.uniforms)
        for draw in (Batch.latent_uniforms, Batch.coins, noise):
            assert not torch.equal(draw(once), draw(other))
    streams = [once.uniforms, once.latent_uniforms(), once.coins(), noise(once)]
    streams.append(draw_uniforms((1,), once.seed))  # what picks the inputs, too
    assert len({stream.flatten()[0].item() for stream in streams}) == len(streams)
    assert once.masked[once.mask].eq(MASK_ID).all()
    assert torch.equal(once.masked[~once.mask], once.tokens[~once.mask])


def scattered():
    """Number words whose blanks need not be adjacent: -> a word number for each position, (6,12).

    Words are numbered in the order in which they begin. Word 1 of the last input was filled in.
    """
    names = torch.randint(4, (6, 12), generator=torch.Generator().manual_seed(0))
    names[2] = 0
    rows = []
    for row in names.tolist():
        order = [0, *dict.fromkeys(name for name in row if name)]
        rows.append([order.index(name) for name in row])
    words = torch.tensor(rows)
    words[5, words[5] == 1] = 0
    return words


def places_of_words(row):
    """Find the blanks of each word in `row`: {number of the word: [position, ...]}."""
    places = {}
    for t, word in enumerate(row.tolist()):
        if word:
            places.setdefault(word, []).append(t)
    return places


def test_words_are_counted_summed_and_averaged_as_in_loops():
    words = scattered()  # (B,T)
    mask = words > 0
    x = torch.randn(6, G, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sums, means, whole = torch.zeros_like(x), torch.zeros_like(x), torch.zeros(6, G).double()
    first, laid_out, earlier = torch.zeros_like(mask), [], 0
    for b, row in enumerate(words):
        places = places_of_words(row)
        for t in mask[b].nonzero().flatten().tolist():
            mine = places[row[t].item()]
            first[b, t] = t == mine[0]
            sums[b, :, t] = sum(x[b, :, s] for s in mine)
            means[b, :, t] = sums[b, :, t] / len(mine)
            whole[b] += x[b, :, t] / mask[b].sum()
            number = [*places].index(row[t].item())
            laid_out.append((earlier + number, mine.index(t)))
        earlier += len(places)

    at = mask[:, None]  # (B,1,T)
    assert torch.equal(per_word.begins_word(words), first)
    assert [*zip(*(numbers.tolist() for numbers in per_word.lay_out_words(words)))] == laid_out
    torch.testing.assert_close(per_word.mean_over_words(x, words), means)
    torch.testing.assert_close(per_word.mean_over_blanks(x, mask), whole)  # 0 if a row has no blank
    assert torch.equal(per_word.spread(x.mT[mask], mask), (x * at).mT)


def test_a_batch_is_where_its_inputs_are():
    """Also what is drawn for it, on the CPU."""
    tokens = torch.zeros(2, 5, dtype=torch.long, device="meta")
    batch = make_batch(tokens, tokens > 0, tokens, 3, (1, 0))
    drawn = batch.latent_uniforms(), batch.coins(), batch.noise(3)
    assert all(x.is_meta for x in (*tensors(batch), *drawn))
