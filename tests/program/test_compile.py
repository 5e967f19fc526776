"""Check that each compiled pass is one graph of fixed shapes, and that it changes no metric."""

from functools import partial

import pytest
import torch
from conftest import run


@pytest.mark.parametrize("changes, update", [({}, (4, 16)), ({"minibatch_size": 2}, (2, 16))])
def test_compile_is_read(flags, tmp_path, monkeypatch, changes, update):
    graphs = []

    def backend(graph, inputs):
        graphs.append([tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs])
        return graph

    _, eager = run(flags, out_dir=tmp_path / "eager", compile=False, **changes)
    assert not graphs
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    _, compiled = run(flags, out_dir=tmp_path / "compiled", compile=True, **changes)
    assert compiled == eager
    tokens = {(4, 16), (2, 16), (4 * 4, 16)}
    shapes = [[x for x in graph if not isinstance(x, tuple) or x in tokens] for graph in graphs]
    # One graph for the rollout and the reference (B,T), one for the judge (B·G,T), and one for the
    # update. A dynamic size would be listed as a further input of its graph.
    assert sorted(shapes) == sorted([[(4, 16)], [(16, 16)], [update]])
