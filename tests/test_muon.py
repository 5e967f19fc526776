"""Muon, which works in the gradient's own type: against torch's, and against an SVD."""

import copy

import pytest
import torch

from model.muon import Muon, orthogonalise

SHAPES = ((24, 8), (8, 24), (16, 16))


def gradients(seed):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) for shape in SHAPES]


def steps(optimizer, matrices, seeds):
    for seed in seeds:
        for p, gradient in zip(matrices, gradients(seed)):
            p.grad = gradient
        optimizer.step()


def make(optimizer, **more):
    matrices = [torch.nn.Parameter(start) for start in gradients(100)]
    return matrices, optimizer(matrices, lr=0.01, weight_decay=0.05, **more)


@pytest.mark.parametrize("shape", SHAPES[:2])  # a square one may have values of almost 0
def test_it_keeps_the_singular_vectors_and_levels_the_values(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    levelled = u.T @ orthogonalise(g) @ vt.T
    assert ((levelled.diagonal() > 0.6) & (levelled.diagonal() < 1.3)).all()
    assert (levelled - levelled.diagonal().diag()).abs().max() < 1e-10


def test_its_steps_are_torchs():
    """To what bfloat16 leaves of a matrix: torch iterates in it, whatever the gradient's type."""
    ours, optimizer = make(Muon)
    steps(optimizer, ours, range(4))
    theirs, optimizer = make(torch.optim.Muon, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    steps(optimizer, theirs, range(4))
    for a, b, start in zip(ours, theirs, gradients(100)):
        assert (a - b).norm() < 0.02 * (b - start).norm()


def test_it_goes_on_from_its_state():
    whole, optimizer = make(Muon)
    steps(optimizer, whole, range(4))
    halves, optimizer = make(Muon)
    steps(optimizer, halves, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0].keys() == {"momentum_buffer"}
    again = Muon(halves, lr=1.0, weight_decay=0.0)
    again.load_state_dict(saved)
    steps(again, halves, range(2, 4))
    for a, b in zip(whole, halves):
        assert torch.equal(a, b)
