"""What a step draws, and the batches its updates take.

Letters: B inputs, T characters, G completions of each, V vocabulary, K values of the latent,
R = B·K rows with g = G/K completions each.
"""

import pytest
import torch

from data.dataset import Dataset
from grpo import kernel, sampling, toy
from grpo.plumbing.config import Config
from grpo.rollout import (
    Inputs,
    Rollout,
    as_policy,
    draw_inputs,
    draw_orders,
    draw_uniforms,
    in_batches,
    operations,
)
from grpo.stats import stats
from model.transformer import Generator, TransformerConfig

B, G, T, V = 6, 8, 5, 4
CPU = torch.device("cpu")


def make_inputs():
    tokens = torch.randint(V - 1, (B, T), generator=torch.Generator().manual_seed(0))
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.5
    uniforms = draw_uniforms(B, G, T, (2,))
    return Inputs(
        tokens, mask, tokens.masked_fill(mask, V - 1), uniforms, draw_orders(1, B, (1, 0))
    )


def make_rollout(K):
    """Every number of an input b is b, of its row z and completion j b + z/10 + j/1000."""
    b = torch.arange(B).float()
    z = torch.arange(K) / 10
    j = torch.arange(G // K) / 1000
    row = (b[:, None] + z).flatten()  # (R,)
    completion = row[:, None] + j  # (R,g)
    by_character = completion[..., None].expand(-1, -1, T)  # (R,g,T)
    return Rollout(
        masked=b[:, None].expand(B, T),
        mask=row[:, None].expand(-1, T),
        completions=by_character,
        kept=row[:, None, None].expand(-1, T, V),
        ref_logits=row[:, None, None].expand(-1, T, V),
        old_logp=by_character,
        credits=completion[..., None],
        advantages=by_character,
        learning=row[:, None].expand(-1, T),
    )


def inputs_of(rollout):
    """The numbers of a part's inputs; its rows and completions are theirs, whole and in order."""
    numbers = rollout.masked[:, 0].long()
    K = len(rollout.mask) // len(numbers)
    whole = make_rollout(K)
    for name, x in vars(rollout).items():
        want = getattr(whole, name).unflatten(0, (B, -1))[numbers].flatten(0, 1)
        assert torch.equal(x, want), name
    return numbers.tolist()


@pytest.mark.parametrize("K", [1, 2, 4])
def test_a_part_has_all_rows_of_its_inputs(K):
    rollout = make_rollout(K)
    assert inputs_of(rollout) == list(range(B))
    assert inputs_of(rollout.take(slice(2, 4))) == [2, 3]
    assert inputs_of(rollout.take(torch.tensor([5, 0, 3]))) == [5, 0, 3]
    parts = rollout.split(4)  # the last one is what is left
    assert [inputs_of(part) for part in parts] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("K", [1, 2])
def test_updates_take_every_input_once_in_each_pass(K):
    rollout = make_rollout(K)
    whole = list(rollout.updates(Config(num_iterations=3, minibatch_size=0), None))
    assert [inputs_of(batch) for batch in whole] == [list(range(B))] * 3

    config = Config(num_iterations=2, minibatch_size=2)

    def batches_of(seed):
        orders = draw_orders(2, B, seed)
        return [inputs_of(batch) for batch in rollout.updates(config, orders)]

    batches = batches_of((1, 0))
    assert [len(batch) for batch in batches] == [2] * 6
    first = sum(batches[:3], [])
    second = sum(batches[3:], [])
    assert sorted(first) == sorted(second) == list(range(B))
    assert first != second  # each pass has an order of its own,
    assert batches == batches_of((1, 0))  # which the seed decides,
    assert batches != batches_of((1, 1))  # and the step


@pytest.mark.parametrize("K", [1, 2, 4])
def test_rows_of_the_inputs(K):
    """Side by side, as the generator's; each has its own G/K of the uniforms."""
    inputs = make_inputs()
    masked, mask, uniforms = inputs.rows(K)
    assert uniforms.shape == (B * K, G // K, T)
    for row in range(B * K):
        b = row // K
        assert torch.equal(masked[row], inputs.masked[b])
        assert torch.equal(mask[row], inputs.mask[b])
    assert torch.equal(uniforms.view(B, G, T), inputs.uniforms)


def draw_share(data, config, monkeypatch, processes=1, rank=0):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("RANK", str(rank))
    return draw_inputs(data, config, 3, torch.Tensor.clone)


@pytest.mark.parametrize("K", [1, 2])
def test_processes_share_the_inputs_of_a_step(world, monkeypatch, K):
    """What several draw together one draws alone; an input's rows stay with one process."""
    data = Dataset(world / "text", "train")
    shared = {"batch_size": 2, "group_size": 4, "block_size": 16, "masking": "word"}
    whole = draw_share(data, Config(**shared, gradient_accumulation_steps=3), monkeypatch)
    config = Config(**shared, gradient_accumulation_steps=1)
    shares = [draw_share(data, config, monkeypatch, 3, rank) for rank in range(3)]
    for name in ("tokens", "mask", "masked", "uniforms"):
        together = torch.cat([getattr(share, name) for share in shares])
        assert torch.equal(together, getattr(whole, name)), name
    rows = zip(*(share.rows(K) for share in shares))
    for of_shares, of_whole in zip(rows, whole.rows(K)):
        assert torch.equal(torch.cat(of_shares), of_whole)


def test_inputs_are_a_function_of_seed_and_step(world, monkeypatch):
    data = Dataset(world / "text", "train")
    config = Config(batch_size=4, group_size=4, block_size=16, seed=5)
    once = draw_share(data, config, monkeypatch)
    again = draw_share(data, config, monkeypatch)
    other = draw_inputs(data, config, 4, torch.Tensor.clone)
    assert torch.equal(once.tokens, again.tokens)
    assert torch.equal(once.uniforms, again.uniforms)
    assert torch.equal(once.orders, again.orders)
    assert not torch.equal(once.tokens, other.tokens)
    assert not torch.equal(once.uniforms, other.uniforms)
    assert not torch.equal(once.orders, other.orders)
    assert once.masked[once.mask].eq(data.mask_id).all()
    assert torch.equal(once.masked[~once.mask], once.tokens[~once.mask])


def test_batches_are_put_together_again():
    sizes = []

    def two_rows_each(tokens):
        sizes.append(len(tokens))
        return tokens.repeat_interleave(2, dim=0)

    tokens = torch.arange(10).view(5, 2)
    have = in_batches(two_rows_each, tokens, 2)
    assert torch.equal(have, tokens.repeat_interleave(2, dim=0))
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("K", [1, 3])
def test_the_policy_is_penalised_row_by_row(K):
    """With a repetition_penalty, what is sampled and differentiated is what `penalise` makes."""
    torch.manual_seed(0)
    generator = Generator(TransformerConfig(V, T, 1, 1, 16, n_latent=K)).eval()
    torch.nn.init.normal_(generator.head.weight)
    masked = make_inputs().masked
    plain = as_policy(generator, CPU, Config(dtype="float32", compile="false"))(masked)
    config = Config(dtype="float32", compile="false", repetition_penalty=1.5)
    penalised = as_policy(generator, CPU, config)(masked)
    assert torch.equal(plain, generator(masked))
    assert torch.equal(penalised, sampling.penalise(plain, masked, 1.5))
    assert not torch.equal(penalised, plain)


def test_operations_are_the_definitions_or_the_kernels():
    definitions = operations(Config(kernel="torch"), 1)
    assert definitions == (sampling.sample_completions, stats)
    fused = operations(Config(kernel="cuda"), 1)
    assert fused == (kernel.sample_completions, kernel.stats)
    sample_completions, _ = operations(Config(kernel="cuda", kl_of="marginal"), 2)
    assert sample_completions is kernel.sample_completions


def kept_words(n_latent, seed, **settings):
    """The probabilities of `half` and of `help` after GRPO on `h_l_`, the smaller one first."""
    found = toy.train(n_latent=n_latent, seed=seed, **settings)
    return sorted([found["half"], found["help"]])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_coin_keeps_both_words_where_a_product_must_commit(seed):
    """`h_l_`: without a latent one word is left, and with the KL of the mixture's marginals, whose
    weight is the same, two values keep a word each."""
    less, more = kept_words(1, seed)
    assert less < 0.1
    assert more > 0.6
    less, more = kept_words(2, seed, kl_of="marginal")
    assert less > 0.3
    assert less + more > 0.9
