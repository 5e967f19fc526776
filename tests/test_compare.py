import json
import sys
import types

import pytest
from conftest import command_line

import train_grpo
from grpo import compare


@pytest.fixture
def runs(flags, tmp_path, monkeypatch, capsys):
    """Two finished runs, `a` and `b`, in the current folder."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    for name, changes in {"a": {}, "b": {"kl_beta": 0.5, "seed": 2, "log_interval": 2}}.items():
        train_grpo.main(command_line(flags, out_dir=name, **changes))
    capsys.readouterr()
    return tmp_path / "runs"


def printed(capsys, *arguments):
    """-> {name: its columns}, of two lines of one name the first; and all lines."""
    compare.main(list(arguments))
    lines = capsys.readouterr().out.splitlines()
    return {name: cells for name, *cells in (line.split() for line in reversed(lines[1:]))}, lines


def test_differing_settings_and_last_figures(runs, capsys):
    rows, lines = printed(capsys, "a", "b")
    assert (
        lines[0].split() == ["a", "b"]
        and len({len(line) for line in lines if line.startswith("  ")}) == 1
    )  # columns stand straight
    between = lines[lines.index("settings that differ") + 1 : lines.index("the last step's inputs")]
    assert [line.split() for line in between] == [
        ["log_interval", "1", "2"],
        ["kl_beta", "0.1", "0.5"],
        ["seed", "1", "2"],
    ]
    last = [
        json.loads((runs / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in "ab"
    ]
    tables = [json.loads((runs / name / "evaluation.json").read_text()) for name in "ab"]
    assert rows["mean_reward"] == [f"{line['mean_reward']:.4g}" for line in last] and rows[
        "iteration"
    ] == ["3", "3"]
    assert rows["distinct_words"] == [
        f"{table['after_sample']['distinct_words']:.4g}" for table in tables
    ]
    assert rows["gap_closed"] == [
        "-" if table["gap_closed"] is None else f"{table['gap_closed']:.4g}" for table in tables
    ]


def test_a_run_against_itself_differs_in_nothing(runs, capsys):
    _, lines = printed(capsys, "a", "a")
    assert lines.index("the last step's inputs") == lines.index("settings that differ") + 1


def test_the_table_of_an_earlier_run_is_not_shown(runs, capsys):
    metrics = runs / "b" / "metrics.jsonl"
    metrics.write_text(
        metrics.read_text().splitlines(keepends=True)[0]
    )  # a new run in the same folder, killed after two steps
    rows, _ = printed(capsys, "a", "b")
    assert rows["iteration"] == ["3", "1"] and rows["ngram_bits"][1] == "-" != rows["ngram_bits"][0]


def test_a_setting_that_is_younger_than_the_run_had_its_default(runs, capsys):
    settings = json.loads((runs / "b" / "config.json").read_text())
    (runs / "b" / "config.json").write_text(
        json.dumps({name: value for name, value in settings.items() if name != "kl_beta"})
    )
    assert "kl_beta" not in printed(capsys, "a", "b")[0]


def test_the_curves_that_are_drawn(runs, monkeypatch, capsys):
    """A stand-in for matplotlib notes what it is asked to draw."""
    drawn = {}

    class Axes:
        def plot(self, x, y, label):
            self.lines = [*getattr(self, "lines", []), (x, y, label)]

        def set_title(self, title):
            drawn[title] = self.lines

        def legend(self):
            pass

    class Figure:
        def __init__(self, **_):
            pass

        def subplots(self, rows, columns):
            return types.SimpleNamespace(flat=[Axes() for _ in range(rows * columns)])

        def savefig(self, file):
            drawn["file"] = file

    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", types.SimpleNamespace(Figure=Figure))
    rows, _ = printed(capsys, "a", "b", "--plot=curves.png")
    assert (
        drawn.pop("file") == "curves.png" and tuple(drawn) == compare.CURVES and "mean_kl" in rows
    )
    for name, (a, b) in drawn.items():
        assert (a[0], a[2], b[0], b[2]) == ([0, 1, 2, 3], "a", [1, 3], "b")
        assert f"{b[1][-1]:.4g}" == rows[name][1]


def test_a_picture_where_matplotlib_is_installed(runs, capsys):
    pytest.importorskip("matplotlib")
    compare.main(["a", "b", "--plot=curves.png"])
    assert (runs / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, told",
    [
        (
            ["a", "none"],
            "none holds no run, or none that has begun; name folders that train_grpo.py has written",
        ),
        (["a", "a/config.json"], "a/config.json holds no run"),
        (["a", "begun"], "begun holds no run"),
        (["a", "broken"], "broken holds no run"),
        (["a", "--plot=x.png"], "plot=x.png: matplotlib is not installed; pip install matplotlib"),
    ],
)
def test_mistakes_exit_2_with_one_line(arguments, told, runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # not installed
    for folder, text in ("begun", ""), ("broken", "{"):
        (runs / folder).mkdir()
        (runs / folder / "config.json").write_text((runs / "a" / "config.json").read_text())
        (runs / folder / "metrics.jsonl").write_text(text + "\n" * bool(text))
    with pytest.raises(SystemExit) as stopped:
        compare.main(arguments)
    shown = capsys.readouterr()
    assert (
        stopped.value.code == 2
        and not shown.out
        and told in shown.err
        and shown.err.count("\n") == 1
    )
    assert not (runs / "x.png").exists()


def test_help_exits_0():
    with pytest.raises(SystemExit) as stopped:
        compare.main(["--help"])
    assert stopped.value.code == 0
