"""What a step draws, and the batches its updates take. Letters as in grpo/rollout.py."""

import torch
from grpo.rollout import Inputs, Rollout, draw_inputs, draw_orders

from data.dataset import Dataset
from grpo.logprobs import LogProbs
from grpo.plumbing.config import Config
from grpo.sampling import Fills

B, G, T, V = 6, 8, 5, 4


def make_rollout(orders):
    """Every number of input b is b."""
    b = torch.arange(B).float()
    of_characters = b[:, None].expand(B, T)  # (B,T)
    of_draws = b[:, None, None].expand(B, G, T)  # (B,G,T)
    of_logits = b[:, None, None].expand(B, T, V)  # (B,T,V)
    inputs = Inputs(of_characters, of_characters, of_characters, of_draws, of_draws, orders)
    fills = Fills(of_draws, of_logits, of_characters, of_draws)
    old = LogProbs(of_draws, of_draws, of_characters, of_characters)
    return Rollout(inputs, fills, of_logits, old, of_draws, of_draws)


def inputs_of(rollout):
    """The numbers of a part's inputs: everything in it is theirs."""
    numbers = rollout.advantages[:, 0, 0]
    everything = (
        *rollout.inputs[:5],
        *rollout.fills,
        *rollout.old,
        rollout.ref_logits,
        rollout.credits,
    )
    for x in everything:
        assert torch.equal(x.flatten(1)[:, 0], numbers)
    return numbers.long().tolist()


def test_a_part_has_everything_of_its_inputs():
    rollout = make_rollout(torch.zeros(B, 1))
    assert inputs_of(rollout.take(slice(2, 4))) == [2, 3]
    assert inputs_of(rollout.take(torch.tensor([5, 0, 3]))) == [5, 0, 3]
    parts = rollout.split(4)  # the last one is what is left
    assert [inputs_of(part) for part in parts] == [[0, 1, 2, 3], [4, 5]]


def test_updates_take_every_input_once_in_each_pass():
    orders = draw_orders(2, B, (1, 0))
    whole = make_rollout(orders).updates(Config(minibatch_size=0))
    assert [inputs_of(batch) for batch in whole] == [list(range(B))] * 2
    parts = make_rollout(orders).updates(Config(minibatch_size=2))
    batches = [inputs_of(batch) for batch in parts]
    assert [len(batch) for batch in batches] == [2] * 6
    first = sum(batches[:3], [])
    second = sum(batches[3:], [])
    assert sorted(first) == sorted(second) == list(range(B))
    assert first != second  # each pass has an order of its own


def draw_share(data, config, monkeypatch, processes=1, rank=0, step=3):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("RANK", str(rank))
    return draw_inputs(data, config, step, "cpu")


def test_processes_share_the_inputs_of_a_step(world, monkeypatch):
    """What several draw together one draws alone."""
    data = Dataset(world / "text", "train")
    shared = {"batch_size": 2, "group_size": 4, "block_size": 16, "masking": "word"}
    whole = draw_share(data, Config(**shared, gradient_accumulation_steps=3), monkeypatch)
    config = Config(**shared, gradient_accumulation_steps=1)
    shares = [draw_share(data, config, monkeypatch, 3, rank) for rank in range(3)]
    for name in ("tokens", "mask", "masked", "uniforms", "z_uniforms"):
        together = torch.cat([getattr(share, name) for share in shares])
        assert torch.equal(together, getattr(whole, name)), name


def test_inputs_are_a_function_of_seed_and_step(world, monkeypatch):
    data = Dataset(world / "text", "train")
    config = Config(batch_size=4, group_size=4, block_size=16, seed=5)
    once = draw_share(data, config, monkeypatch)
    again = draw_share(data, config, monkeypatch)
    other = draw_share(data, config, monkeypatch, step=4)
    for name in ("tokens", "uniforms", "z_uniforms", "orders"):
        assert torch.equal(getattr(once, name), getattr(again, name)), name
        assert not torch.equal(getattr(once, name), getattr(other, name)), name
    assert not torch.equal(once.uniforms, once.z_uniforms)
    assert once.masked[once.mask].eq(data.mask_id).all()
    assert torch.equal(once.masked[~once.mask], once.tokens[~once.mask])
