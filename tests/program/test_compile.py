"""Check that each compiled pass is one graph of fixed shapes, and that it changes no metric."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import run

from data.user_mistake import Mistake
from grpo import policy


@pytest.mark.parametrize("changes, update", [({}, (4, 16)), ({"minibatch_size": 2}, (2, 16))])
def test_compile_is_read(flags, tmp_path, monkeypatch, changes, update):
    graphs = []

    def backend(graph, inputs):
        graphs.append([tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs])
        return graph

    _, eager = run(flags, out_dir=tmp_path / "eager", compile="auto", **changes)
    assert not graphs
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    monkeypatch.setattr(policy, "can_compile", lambda: True)
    _, compiled = run(flags, out_dir=tmp_path / "compiled", compile="true", **changes)
    assert compiled == eager
    assert json.loads(Path(tmp_path, "compiled", "config.json").read_text())["compile"] == "true"
    tokens = {(4, 16), (2, 16), (4 * 4, 16)}
    shapes = [[x for x in graph if not isinstance(x, tuple) or x in tokens] for graph in graphs]
    # One graph each for the rollout (B,T), the reference (B,T), the judge (B·G,T) and the update. A
    # dynamic size would be listed as a further input of its graph.
    assert sorted(shapes) == sorted([[(4, 16)], [(4, 16)], [(16, 16)], [update]])


def test_compile_auto_is_for_cuda(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch, "compile", lambda f: f)
    for device in cpu, cuda:
        assert policy.pick_compile("true", device) == "true"
        assert policy.pick_compile("false", device) == "false"
    assert policy.pick_compile("auto", cpu) == "false"
    assert policy.pick_compile("auto", cuda) == "true"
    monkeypatch.setattr(torch, "compile", lambda f: 1 / 0)  # no compiler
    assert policy.pick_compile("auto", cuda) == "false"
    with pytest.raises(Mistake, match="compile=true needs a C\\+\\+ compiler"):
        policy.pick_compile("true", cpu)
