"""The real wandb: offline, what it wrote; unreachable, not there, or dying: the run goes on, with
one warning.
"""

import json
import re
import socket
import sys
from pathlib import Path

import pytest

import train_grpo
from grpo.plumbing import log
from tests.conftest import command_line

wandb = pytest.importorskip("wandb")
Record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record


@pytest.fixture(autouse=True)
def forgetting():
    """wandb reads the environment once in a process."""
    wandb.teardown()
    yield
    wandb.teardown()


def records(path):
    """The records of a .wandb file, which has LevelDB's log format.

    After 7 bytes, blocks of 32 kB of fragments with a header of checksum, length and type.
    """
    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # too little for a header is left empty
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            yield Record.FromString(parts)
            parts = b""


def values(items):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def run(flags, **changes):
    train_grpo.main(
        command_line(
            flags,
            wandb_log="true",
            wandb_project="p",
            wandb_run_name="n",
            lr_decay_iters=4,
            **changes,
        )
    )
    return [
        json.loads(line)
        for line in (Path(flags["out_dir"]) / "metrics.jsonl").read_text().splitlines()
    ]


def test_offline_it_holds_what_the_run_wrote(flags, monkeypatch, capfd):
    """Settings, each step's metrics, histograms, a table of the completions, figures as summary.

    A resumed run goes on under its id.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    halves, out, ids = (
        [run(flags, max_iters=2), run(flags, max_iters=4, init_from="resume")[2:]],
        Path(flags["out_dir"]),
        set(),
    )
    wandb.teardown()  # waits until all is written
    logs = sorted(out.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    for path, lines in zip(logs, halves, strict=True):
        found = list(records(path))
        begun = next(record.run for record in found if record.HasField("run"))
        assert (begun.project, begun.display_name) == ("p", "n") and values(begun.config.update)[
            "group_size"
        ] == 4
        ids.add(begun.run_id)
        steps = [values(record.history.item) for record in found if record.HasField("history")]
        for step, line in zip(steps, lines, strict=True):
            assert (
                step["_step"] == line.pop("iteration")
                and {name: step[name] for name in line} == line
            )
            assert (
                step["credits._type"] == step["advantages._type"] == "histogram"
                and sum(step["credits.values"]) == sum(step["advantages.values"]) > 4 * 4
            )
        table = json.loads((path.parent / "files" / steps[-1]["completions.path"]).read_text())
    assert len(ids) == 1
    assert table["columns"] == ["input", "completion", "judge"] and table["data"] == [
        list(json.loads(line).values())
        for line in (out / "completions.jsonl").read_text().splitlines()
    ]
    summary = {}
    for record in found:
        summary |= values(record.summary.update)
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert {name: summary[name] for name in evaluation} == evaluation
    assert "".join(capfd.readouterr()).count("wandb: ") == 2  # where it is, once a run


def unreachable(monkeypatch):
    """A port of this machine at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (
        ("WANDB_MODE", "online"),
        ("WANDB_BASE_URL", f"http://127.0.0.1:{port}"),
        ("WANDB_API_KEY", 40 * "a"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(log, "WANDB_SECONDS", 1)
    return "Timed out"


def not_logged_in(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    for name, value in (
        ("WANDB_API_KEY", None),
        ("NETRC", "/dev/null"),
        ("WANDB_BASE_URL", "http://127.0.0.1:9"),
    ):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    return "wandb login"


def not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    return "ModuleNotFoundError"


def dying(monkeypatch):
    """Its process is gone in the midst of the run."""

    def broken(*_):
        raise ConnectionResetError("Connection reset by peer")

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "Histogram", broken)
    return "Connection reset"


@pytest.mark.parametrize("trouble", [unreachable, not_logged_in, not_installed, dying])
def test_trouble_is_one_warning_and_the_run_goes_on(flags, monkeypatch, capfd, trouble):
    told = trouble(monkeypatch)
    lines = run(flags, max_iters=2)
    wandb.finish()
    shown = [
        line
        for line in "".join(capfd.readouterr()).splitlines()
        if re.search("wandb.*(given up|WARN|ERROR)", line)
    ]
    assert len(shown) == 1 and "the run goes on" in shown[0] and told in shown[0], shown
    assert [line["iteration"] for line in lines] == [0, 1] and all(
        line["mean_reward"] > 0 for line in lines
    )
    assert {"checkpoint.pt", "config.json", "evaluation.json", "completions.jsonl"} <= {
        path.name for path in Path(flags["out_dir"]).iterdir()
    }
