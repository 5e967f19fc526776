"""Check how inputs are drawn, split among processes, and handed out to updates.

Shapes: B inputs, T characters, G completions of each input.
"""

from dataclasses import asdict

import pytest
import torch

from data.dataset import read_dataset
from grpo.batch import Batch, draw_batch, inputs_of_updates, make_batch, make_uniforms
from grpo.metrics import Rollout
from grpo.policy import LogProbs, Sample
from grpo.run.config import Config

B, G, T = 7, 3, 5


def own(*shape):
    """Make rows in which every number that belongs to input b is b: (B,*shape)."""
    return torch.arange(B).view(B, *[1] * len(shape)).expand(B, *shape)


def tensors(record):
    """List every tensor of a record, also of the records and dicts inside it."""
    found = []
    for x in (record if isinstance(record, dict) else asdict(record)).values():
        found += tensors(x) if isinstance(x, dict) else [x] if x is not None else []
    return found


@pytest.mark.parametrize("rows", [slice(2, 5), torch.tensor([5, 0, 3])])
def test_rows_of_a_record_are_rows_of_everything_in_it(rows):
    batch = Batch(own(T), own(T), own(T), own(G, T), own(G), own(T), own(G), own(2))
    old = LogProbs(own(G, T), own(G, T), own(T), own(T))
    rollout = Rollout(batch, Sample(own(G, T)), old, own(G), {"judge": own(G)}, own(G))
    found = tensors(rollout[rows])
    assert len(found) == 8 + 1 + 4 + 3
    assert all(x.view(len(x), -1)[:, 0].tolist() == torch.arange(B)[rows].tolist() for x in found)


def updates(seed, size):
    """List the inputs of each update of a step with two epochs."""
    batch = make_batch(own(T), own(T) > 9, G, seed, epochs=2)
    chosen = inputs_of_updates(batch, Config(minibatch_size=size, num_iterations=2))
    return [each.tolist() for each in chosen]


def test_every_epoch_takes_every_input_once_in_an_order_of_its_own():
    in_order = list(range(B))
    assert updates((1, 0), size=0) == [in_order, in_order]
    parts, others = updates((1, 0), size=3), updates((1, 1), size=3)
    assert [*map(len, parts)] == [3, 3, 1] * 2
    epochs = [sum(each, []) for each in (parts[:3], parts[3:], others[:3], others[3:])]
    assert all(sorted(epoch) == in_order for epoch in epochs)
    assert len({str(epoch) for epoch in [*epochs, in_order]}) == 5


@pytest.fixture
def draw_share(world, monkeypatch):
    """Return a function that draws one process's share of a step."""
    data = read_dataset(world / "text" / "train.txt", 16)

    def draw(processes=1, rank=0, step=3, **settings):
        monkeypatch.setattr("grpo.distributed.PROCESSES", processes)
        monkeypatch.setattr("grpo.distributed.RANK", rank)
        config = Config(group_size=4, block_size=16, masking="word", **settings)
        return draw_batch(data, config, step, "cpu")

    return draw


def test_processes_share_the_inputs_of_a_step(draw_share):
    """Three processes together draw the inputs and numbers that one process draws alone."""
    whole = draw_share(batch_size=2, gradient_accumulation_steps=3)
    shares = [draw_share(3, rank, batch_size=2) for rank in range(3)]
    together = [torch.cat(parts) for parts in zip(*map(tensors, shares))]
    assert all(map(torch.equal, together, tensors(whole)))


def test_inputs_are_a_function_of_seed_and_step(draw_share):
    """Step 3 shares nothing with its neighbors, nor with another seed."""
    changed = {}, {}, {"step": 2}, {"step": 4}, {"seed": 6}
    once, again, *others = (draw_share(batch_size=4, **changes) for changes in changed)
    assert all(map(torch.equal, tensors(once), tensors(again)))
    for other in others:
        assert not any(map(torch.equal, tensors(once), tensors(other)))
    streams = [once.uniforms, once.latents, once.coins, once.noise]
    streams.append(make_uniforms((1,), (1, 3, 0)))  # what picks the inputs, too
    assert len({stream.flatten()[0].item() for stream in streams}) == len(streams)


def test_a_batch_is_where_its_inputs_are():
    """Also what's drawn for it, on the CPU."""
    tokens = torch.zeros(2, T, dtype=torch.long, device="meta")
    assert all(x.is_meta for x in tensors(make_batch(tokens, tokens > 0, G, (1, 0))))
