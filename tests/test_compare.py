import json
import shutil
import sys
import types
from pathlib import Path

import pytest
from conftest import command_line

import train_grpo
from grpo import compare

DIFFERENT = {"a": {}, "b": {"kl_beta": 0.5, "seed": 2, "log_interval": 2}}
trained = {}  # what the two runs wrote: {path: bytes}, once for all tests of this file


@pytest.fixture
def runs(flags, tmp_path, monkeypatch, capsys):
    """Two finished runs, `a` and `b`, in the current folder."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if not trained:
        for name, changes in DIFFERENT.items():
            train_grpo.main(command_line(flags, out_dir=name, **changes))
            trained.update((path, path.read_bytes()) for path in Path(name).iterdir())
    for path, content in trained.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    capsys.readouterr()
    return folder


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
        json.dumps({name: value for name, value in settings.items() if name != "seed"})
    )
    assert "seed" not in printed(capsys, "a", "b")[0]


def as_stdout(encoding, monkeypatch):
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(encoding=encoding))


def test_a_line_of_eighths(monkeypatch):
    as_stdout("utf-8", monkeypatch)
    assert compare.line_of_eighths([0, 1, 2, 3, 4, 5, 6, 7], 0, 7) == "▁▂▃▄▅▆▇█"
    assert compare.line_of_eighths([1.0, 1.0], 1.0, 1.0) == "▁▁"  # flat
    as_stdout("ascii", monkeypatch)
    assert compare.line_of_eighths([0, 7], 0, 7) == "_#"
    long = compare.line_of_eighths([*range(1000)], 0, 999)
    assert len(long) == compare.WIDTH and long[0] == "_" and long[-1] == "#"


def test_the_curves_of_all_runs_stand_below_each_other(runs, capsys):
    _, lines = printed(capsys, "a", "b")
    drawn = [line for line in lines if line.startswith("mean_reward  ")]
    first = json.loads((runs / "a" / "metrics.jsonl").read_text().splitlines()[0])
    assert [line.split()[1] for line in drawn] == ["a", "b"]
    assert drawn[0].split()[2] == f"{first['mean_reward']:.3f}"
    assert len(drawn[0].split()[3]) == 4 and len(drawn[1].split()[3]) == 2  # log_interval is 2


def test_curves_share_a_scale_and_may_lack_a_figure(monkeypatch):
    as_stdout("ascii", monkeypatch)
    shown = compare.curves(
        {
            "a": [{"entropy": 0.0}, {"entropy": 1.0}],
            "bb": [{"entropy": 1.0, "mean_kl": 2.0}, {"entropy": 2.0, "mean_kl": 2.0}],
        }
    )
    assert [line.split() for line in shown.splitlines()] == [
        ["mean_kl", "bb", "2.000", "__", "2.000"],
        ["entropy", "a", "0.000", "_=", "1.000"],
        ["entropy", "bb", "1.000", "=#", "2.000"],
    ]


def test_different_held_out_inputs_are_said(runs, capsys):
    told = "the held-out inputs differ between these runs: do not compare their figures"
    assert told not in printed(capsys, "a", "b")[1]
    path = runs / "b" / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"held_out": "another"}))
    assert told in printed(capsys, "a", "b")[1]
    path.unlink()  # no figures to compare
    assert told not in printed(capsys, "a", "b")[1]


class Axes:
    """Notes what it is asked to draw."""

    def __init__(self):
        self.lines, self.bands, self.points, self.notes = [], [], [], []

    def plot(self, x, y, label="", **_):
        self.lines.append(([*x], [*y], label))
        return [types.SimpleNamespace(get_color=lambda: "blue")]

    def fill_between(self, x, low, high, **_):
        self.bands.append(([*x], [*low], [*high]))

    def scatter(self, x, y, c, marker, **_):
        self.points.append((x, y, c, marker))

    def annotate(self, text, at, **_):
        self.notes.append((text, at))

    def set_title(self, title):
        self.name = title

    def ignore(self, *_, **__):
        pass

    legend = set_xscale = set_xticks = set_xlabel = set_ylabel = ignore


@pytest.fixture
def drawn(monkeypatch):
    """A stand-in for matplotlib: {file: the panels that were saved in it}."""
    files = {}

    class Figure:
        def __init__(self, **_):
            self.axes = []

        def subplots(self, rows=1, columns=1):
            self.axes = [Axes() for _ in range(rows * columns)]
            return types.SimpleNamespace(flat=self.axes) if rows > 1 else self.axes[0]

        def colorbar(self, _, label):
            pass

        def savefig(self, file, **_):
            files[file] = self.axes

    monkeypatch.setitem(sys.modules, "matplotlib", types.SimpleNamespace(rcParams={}))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", types.SimpleNamespace(Figure=Figure))
    return files


def test_the_curves_that_are_drawn(runs, drawn, capsys):
    rows, _ = printed(capsys, "a", "b", "--plot=curves.png")
    panels = drawn["curves.png"]
    assert tuple(axes.name for axes in panels) == compare.CURVES and "mean_kl" in rows
    for axes in panels:
        a, b = axes.lines
        assert (a[0], a[2], b[0], b[2]) == ([0, 1, 2, 3], "a", [1, 3], "b") and not axes.bands
        assert f"{b[1][-1]:.4g}" == rows[axes.name][1]


def test_runs_that_differ_in_their_seed_alone_are_a_band(runs, drawn, capsys):
    shutil.copytree(runs / "a", runs / "c")
    settings = json.loads((runs / "a" / "config.json").read_text())
    (runs / "c" / "config.json").write_text(json.dumps(settings | {"seed": 5}))
    lines = (runs / "a" / "metrics.jsonl").read_text().splitlines()
    higher = [json.loads(line) for line in lines]
    for line in higher:
        line["mean_kl"] += 2
    (runs / "c" / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in higher))
    compare.main(["a", "b", "c", "--plot=curves.png"])
    axes = drawn["curves.png"][compare.CURVES.index("mean_kl")]
    assert [line[2] for line in axes.lines] == ["a, c", "b"]
    ((steps, low, high),) = axes.bands
    want = [json.loads(line)["mean_kl"] for line in lines]
    assert steps == [0, 1, 2, 3] and low == pytest.approx(want)
    assert high == pytest.approx([x + 2 for x in want])
    assert axes.lines[0][1] == pytest.approx([x + 1 for x in want])  # the mean


def test_valid_words_against_forward_passes(runs, drawn, capsys):
    compare.main(["a", "b", "--passes=passes.png"])
    (axes,) = drawn["passes.png"]
    tables = [json.loads((runs / name / "evaluation.json").read_text()) for name in "ab"]
    stars = [point for point in axes.points if point[3] == "*"]
    columns = ("forward_passes", "valid_words", "distinct_words")
    want = [tuple(table["after_sample"][column] for column in columns) for table in tables]
    assert [point[:3] for point in stars] == want
    # Both runs began with one generator, on the same inputs: it is drawn once, in seven ways.
    names = [*compare.SEVERAL_PASSES, "before_best_of_16"]
    assert len(names) == 7
    want = [tuple(tables[0][name][column] for column in columns) for name in names]
    assert [point[:3] for point in axes.points if point[3] != "*"] == want
    assert axes.lines[0][0] == sorted(axes.lines[0][0])


def test_valid_words_against_variety(runs, drawn, capsys):
    compare.main(["a", "b", "--frontier=frontier.png"])
    (axes,) = drawn["frontier.png"]
    tables = [json.loads((runs / name / "evaluation.json").read_text()) for name in "ab"]
    columns = ("different_valid_words", "valid_words")
    # Both runs began with one generator, on the same inputs: it is drawn once, at its temperatures.
    by_temperature = tables[0]["before_at_temperatures"]
    generator = json.loads((runs / "a" / "config.json").read_text())["generator_checkpoint"]
    want = {
        f"{generator} at temperatures": by_temperature,
        f"{generator} after GRPO": [table["after_sample"] for table in tables],
    }
    for (x, y, label), (title, rows) in zip(axes.lines, want.items(), strict=True):
        assert label == title
        assert [*zip(x, y)] == [tuple(row[name] for name in columns) for row in rows]
    noted = [text for text, _ in axes.notes]
    assert noted == ["0.2", "0.4", "0.6", "0.8", "1.0", "a", "b"]
    assert axes.notes[-1][1] == [tables[1]["after_sample"][name] for name in columns]


def test_a_picture_where_matplotlib_is_installed(runs, capsys):
    pytest.importorskip("matplotlib")
    flags = ("plot", "passes", "frontier")
    compare.main(["a", "b", *map("--{}={}.png".format, flags, flags)])
    for name in flags:
        picture = (runs / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) < 200_000


@pytest.mark.parametrize(
    "arguments, told",
    [
        (
            ["a", "none"],
            "none holds no run, or none that has begun; name folders that train_grpo.py has",
        ),
        (["a", "a/config.json"], "a/config.json holds no run"),
        (["a", "begun"], "begun holds no run"),
        (["a", "broken"], "broken holds no run"),
        (["a", "--plot=x.png"], "plot=x.png: matplotlib is not installed; pip install matplotlib"),
        (["a", "--passes=x.png"], "passes=x.png: matplotlib is not installed; pip install"),
        (["a", "--frontier=x.png"], "frontier=x.png: matplotlib is not installed; pip install"),
        (["a", "list"], "list holds no run"),
        (["a", "number"], "number holds no run"),
    ],
)
def test_mistakes_exit_2_with_one_line(arguments, told, runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # not installed
    for folder, text in ("begun", ""), ("broken", "{"):
        (runs / folder).mkdir()
        (runs / folder / "config.json").write_text((runs / "a" / "config.json").read_text())
        (runs / folder / "metrics.jsonl").write_text(text + "\n" * bool(text))
    for folder, text in ("list", "[]"), ("number", "1"):  # for evaluation.json
        shutil.copytree(runs / "a", runs / folder)
        (runs / folder / "evaluation.json").write_text(text)
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


def test_a_table_without_its_temperatures_is_named(runs, drawn, capsys):
    """Written by an older program."""
    file = runs / "b" / "evaluation.json"
    table = json.loads(file.read_text())
    del table["before_at_temperatures"]
    file.write_text(json.dumps(table))
    with pytest.raises(SystemExit):
        compare.main(["a", "b", "--frontier=x.png"])
    told = capsys.readouterr().err
    assert "b has no before_at_temperatures" in told and "python -m grpo.evaluate b" in told
    assert not drawn and told.count("\n") == 1


def test_help_exits_0():
    with pytest.raises(SystemExit) as stopped:
        compare.main(["--help"])
    assert stopped.value.code == 0
