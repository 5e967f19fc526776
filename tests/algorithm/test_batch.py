"""Check how inputs are drawn, split among processes, and split into minibatches.

Shapes: B inputs, T characters, G completions of each.
"""

from dataclasses import is_dataclass, replace

import pytest
import torch

from data.dataset import read_dataset
from data.vocabulary import MASK_ID
from grpo.batch import Batch, draw_batch, make_batch, make_uniforms, minibatches
from grpo.metrics import Rollout
from grpo.policy import LogProbs, Sample
from grpo.run.config import Config

B, G, T = 7, 3, 5


def nested():
    """Make rows in which every number that belongs to input b equals b."""

    def own(*shape):
        return torch.arange(B).view(B, *[1] * len(shape)).expand(B, *shape)

    batch = Batch(own(T), own(T), own(T), own(G, T), own(), B, (1, 0))
    old = LogProbs(own(G, T), own(G, T), own(T), own(T))
    return Rollout(batch, Sample(own(G, T)), old, own(G), {"judge": own(G)}, own(G))


def tensors(record):
    """List every tensor of a record, also of the records and dicts inside it."""
    found = []
    for value in (record if isinstance(record, dict) else vars(record)).values():
        found += tensors(value) if is_dataclass(value) or isinstance(value, dict) else [value]
    return [x for x in found if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(
    "rows, want", [(slice(2, 4), [2, 3]), (torch.tensor([5, 0, 3]), [5, 0, 3])]
)
def test_rows_of_a_record_are_rows_of_everything_in_it(rows, want):
    part = nested()[rows]
    assert len(tensors(part)) == 5 + 1 + 4 + 3
    assert all(x.view(len(x), -1)[:, 0].tolist() == want for x in tensors(part))
    assert (part.batch.size, part.batch.seed) == (B, (1, 0))


def order(epoch, seed=(1, 0), size=3):
    """List the inputs of each update of an epoch."""
    batch = replace(nested().batch, seed=seed)
    return [rows.tolist() for rows in minibatches(batch, epoch, Config(minibatch_size=size))]


def test_every_epoch_takes_every_input_once_in_an_order_of_its_own():
    in_order = list(range(B))
    assert order(0, size=0) == order(1, size=0) == [in_order]
    orders = [order(0), order(1), order(2), order(0, seed=(1, 1))]
    for parts in orders:
        assert [len(part) for part in parts] == [3, 3, 1]
        assert sorted(sum(parts, [])) == in_order
    different = {str(sum(parts, [])) for parts in [*orders, [in_order]]}
    assert len(different) == 5
    assert order(2) == orders[2], "an epoch's order is a function of the seed"


def random_numbers(batch):
    """List all random numbers of a batch, one tensor for each stream of them."""
    return [batch.uniforms, batch.latent_uniforms(), batch.coins(), batch.noise(T)]


@pytest.fixture
def draw_share(world, monkeypatch):
    """Return a function that draws one process's share of a step."""
    data = read_dataset(world / "text" / "train.txt", 16)
    fixed = {"group_size": 4, "block_size": 16, "masking": "word"}

    def draw(processes=1, rank=0, step=3, **settings):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("RANK", str(rank))
        return draw_batch(data, Config(**fixed | settings), step, "cpu")

    return draw


def test_processes_share_the_inputs_of_a_step(draw_share):
    """Three processes together draw the inputs that one process draws alone."""
    whole = draw_share(batch_size=2, gradient_accumulation_steps=3)
    shares = [draw_share(3, rank, batch_size=2) for rank in range(3)]
    for have in (shares, [whole[:4], whole[4:]]):
        together = [torch.cat(parts) for parts in zip(*map(tensors, have))]
        assert all(map(torch.equal, together, tensors(whole)))
        together = [torch.cat(parts) for parts in zip(*map(random_numbers, have))]
        assert all(map(torch.equal, together, random_numbers(whole)))


def test_inputs_are_a_function_of_seed_and_step(draw_share):
    once, again, *others = (
        draw_share(batch_size=4, **changes) for changes in ({}, {}, {"step": 4}, {"seed": 6})
    )
    assert all(map(torch.equal, tensors(once), tensors(again)))
    streams = random_numbers(once)
    for other in others:
        assert not torch.equal(once.tokens, other.tokens)
        assert not any(map(torch.equal, streams, random_numbers(other)))
    streams.append(make_uniforms((1,), once.seed))  # what picks the inputs, too
    assert len({stream.flatten()[0].item() for stream in streams}) == len(streams)
    assert once.masked[once.mask].eq(MASK_ID).all()
    assert torch.equal(once.masked[~once.mask], once.tokens[~once.mask])


def test_a_batch_is_where_its_inputs_are():
    """Also what is drawn for it, on the CPU."""
    tokens = torch.zeros(2, T, dtype=torch.long, device="meta")
    batch = make_batch(tokens, tokens > 0, G, (1, 0))
    assert all(x.is_meta for x in (*tensors(batch), *random_numbers(batch)))
