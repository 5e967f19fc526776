"""Run fill, compare and bench, each by its command, on runs of tiny models."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import command_line

import train_grpo
from data.dataset import encode
from data.text.prepare import VOCABULARY
from grpo.plumbing.checkpoint import model_file, write
from grpo.tools import bench, compare, fill
from model.transformer import Judge, TransformerConfig

RUNS = {"a": {}, "b": {"kl_beta": 0.5, "seed": 2}}
trained = []  # the folder of both runs, after the first test has made it


@pytest.fixture
def runs(flags, tmp_path_factory, monkeypatch):
    """Go to a folder with two finished runs, `a` and `b`, whose reward also pays for vowels."""
    folder = trained[0] if trained else tmp_path_factory.mktemp("runs")
    monkeypatch.chdir(folder)
    if not trained:
        for name, changes in RUNS.items():
            reward = {"out_dir": name, "reward": "judge:1,data/vowel_reward.py:vowels:0.2"}
            train_grpo.main(command_line(flags, **reward, **changes))
        trained.append(folder)
    return folder


def printed_by(capsys, call, *arguments):
    capsys.readouterr()
    call(*arguments)
    return capsys.readouterr().out.splitlines()


def printed(capsys, main, *arguments):
    return printed_by(capsys, main, [str(argument) for argument in arguments])


def refused(capsys, main, *arguments):
    """Run a command that must be refused: -> its one line on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and not shown.out and shown.err.count("\n") == 1
    return shown.err


def parts_of(lines):
    """Group lines by the title above them: -> {title: [its lines]}."""
    parts = {}
    for line in lines:
        if not line.startswith("  "):
            parts[line] = rows = []
        else:
            rows.append(line)
    return parts


def columns(lines):
    """Split the lines that `compare` prints: -> {title of a part: {name: its columns}}."""
    return {
        title: {name: cells for name, *cells in map(str.split, rows)}
        for title, rows in parts_of(lines[1:]).items()
    }


def last_line(run):
    return json.loads(Path(run, "metrics.jsonl").read_text().splitlines()[-1])


def evaluation(run):
    return json.loads(Path(run, "evaluation.json").read_text())


# fill


def test_fills_come_with_their_exact_probability(world):
    generator, vocabulary = fill.load(world / "generator.pt")
    text = "a c_t s_t"
    found = fill.fill(generator, vocabulary, text, k=200, temperature=0.7)
    with torch.no_grad():
        masked = encode(text, vocabulary, 16, "text")[None]  # (1,T)
        p = (generator(masked)[0].double() / 0.7).softmax(dim=-1)[0]  # (T,V)
    for one in found:
        assert re.fullmatch("a c[a-z ]t s[a-z ]t", one.text)
        exact = p[3, vocabulary.index(one.text[3])] * p[7, vocabulary.index(one.text[7])]
        assert math.exp(one.log_prob) == pytest.approx(exact.item(), rel=1e-4)
    assert 1 < len({one.text for one in found}) == len(found) < 200
    log_probs = [one.log_prob for one in found]
    assert log_probs == sorted(log_probs, reverse=True)
    one, two = (fill.fill(generator, vocabulary, text, seed=seed) for seed in (1, 2))
    assert one != two


def test_a_run_is_shown_before_and_after(runs, world, capsys):
    parts = parts_of(printed(capsys, fill.main, "the c_t _at", "--run=a", "--k=4"))
    assert list(parts) == [f"before  {world}/generator.pt", "after   a/checkpoint.pt"]
    for path, (heads, *rows) in zip((world / "generator.pt", "a"), parts.values()):
        assert heads.split() == ["probability", "judge"]
        pattern = r" +[\d.e-]+  [01]\.\d{3}  the c\[([a-z ])\]t \[([a-z ])\]at"
        shown = [re.fullmatch(pattern, row).groups() for row in rows]
        found = fill.fill(*fill.load(path), "the c_t _at", k=4)
        assert shown == [(one.text[5], one.text[8]) for one in found]


def test_without_a_name_it_is_the_run_in_out_or_what_ships(
    runs, world, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(fill.Config, "generator_checkpoint", f"{world}/generator.pt")
    monkeypatch.chdir(tmp_path)
    lines = printed(capsys, fill.main, "th_", f"--judge={world}/judge.pt")
    assert list(parts_of(lines)) == [f"{world}/generator.pt"]
    shutil.copytree(runs / "a", "out")
    assert "after   out/checkpoint.pt" in printed(capsys, fill.main, "th_")


def test_texts_are_read_as_prompts_are(runs, capsys):
    """Texts are normalised. If this drops characters, a line says so. Errors say what is wrong."""
    lines = printed(capsys, fill.main, "The C_t", "2 d_gs", "--run=a", "--k=1")
    shown = [re.sub(r"\[.\]", "_", line[22:]) for line in lines if "[" in line]
    assert shown == [*["the c_t"] * 2, *["d_gs"] * 2]
    said = [line for line in lines if line.startswith("only a to z and space are read")]
    assert said == ["only a to z and space are read, so this is: d_gs"]
    assert "'the cat' has no blank; write _" in refused(capsys, fill.main, "the cat", "--run=a")
    line = refused(capsys, fill.main, "a_" * 9, "--run=a")
    assert "has 18 characters, more than 16; shorten it" in line


def test_a_judge_that_cannot_read_as_much_is_refused(runs, tmp_path, capsys):
    short = Judge(TransformerConfig(28, 12, 1, 1, 32))
    write(tmp_path / "short.pt", model_file(short, VOCABULARY))
    line = refused(capsys, fill.main, "c_t", "--run=a", f"--judge={tmp_path}/short.pt")
    assert "16 is more than the 12 characters that the judge was made for" in line


# compare


def test_runs_stand_side_by_side(runs, capsys):
    lines = printed(capsys, compare.main, "a", "b")
    parts = columns(lines)
    assert lines[0].split() == ["a", "b"]
    assert parts["settings that differ"] == {
        "seed": ["1", "2"],
        "kl_beta": ["0.1", "0.5"],
    }
    last = parts["training, the last step logged"]
    assert last["iteration"] == ["3", "3"]
    for name in ("mean_reward", "valid_words", "reward_vowels"):
        assert last[name] == [f"{last_line(run)[name]:.4g}" for run in "ab"]
    for when in ("before", "after"):
        held_out = parts[f"held-out inputs, {when}, sampled"]
        for name in ("valid_words", "reward_vowels"):
            rows = [evaluation(run)[f"{when}_sample"] for run in "ab"]
            assert held_out[name] == [f"{row[name]:.4g}" for row in rows]
    curves = [line.split() for line in lines if line.startswith("mean_reward ")]
    assert [cells[1] for cells in curves] == ["a", "b"]
    assert columns(printed(capsys, compare.main, "a", "a"))["settings that differ"] == {}


def test_rewards_that_mean_something_else_have_a_scale_each(runs, tmp_path, capsys):
    """Each curve of mean_reward has its own scale. The curves of entropy still share one."""
    other = shutil.copytree("b", tmp_path / "other")
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"reward": "judge:100"}))
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    scaled = [
        json.dumps(line | {name: 100 * line[name] for name in ("mean_reward", "entropy")}) + "\n"
        for line in lines
    ]
    (other / "metrics.jsonl").write_text("".join(scaled))
    curves = {}
    for folder in ("b", other):
        for line in printed(capsys, compare.main, "a", folder):
            if line.startswith(("mean_reward ", "entropy ")):
                name, run, _, drawn, _ = line.split()
                curves[name, run, folder] = drawn
    assert curves["mean_reward", "a", other] != curves["mean_reward", "a", "b"]
    assert {*curves["mean_reward", "a", other]} >= {"▁", "█"}
    assert curves["entropy", "a", other] == "▁▁▁▁"


def test_a_run_that_goes_on_has_no_table_yet(runs, tmp_path, capsys):
    going = shutil.copytree("b", tmp_path / "going")
    (going / "evaluation.json").unlink()
    rows = columns(printed(capsys, compare.main, "a", going))["held-out inputs, after, sampled"]
    assert rows["valid_words"][1] == "-" != rows["valid_words"][0]
    (going / "config.json").unlink()
    assert "holds no run that has finished a step" in refused(capsys, compare.main, "a", going)


# bench


def test_variants_take_turns_and_a_ratio_is_taken_within_a_round(monkeypatch, capsys):
    calls = []
    took = iter([99, 99, 2, 8, 10, 30, 4, 8])  # the first round does not count

    monkeypatch.setattr(bench, "ROUNDS", 3)
    monkeypatch.setattr(bench.Clock, "read", lambda clock: {"step_ms": next(took)})
    variants = {name: partial(calls.append, name) for name in ("eager", "other")}
    title, *rows = printed_by(capsys, bench.race, "title", variants, torch.device("cpu"))
    assert calls == ["eager", "other"] * 4 and title == "title"
    assert [row.split() for row in rows] == [
        ["eager", "4.00", "ms", "1.00"],
        ["other", "8.00", "ms", "3.00"],  # the ratios of the three rounds are 4, 3 and 2
    ]


def test_the_benchmark_times_the_step_and_the_operations(flags, monkeypatch, capsys):
    for name in ("out_dir", "group_size"):
        del flags[name]
    monkeypatch.setattr(bench, "STEP", flags | bench.STEP | {"batch_size": 4})
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(bench, "T", 8)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    bench.main()
    parts = parts_of(capsys.readouterr().out.splitlines()[1:])
    both = ["eager", "compiled"]
    wanted = {}
    for G in (16, 32):
        wanted[f"step, G = {G}"] = [
            f"{what}, {how}" for how in both for what in ("step", "judge alone")
        ]
        wanted[f"sample_completions, G = {G}"] = both
        wanted[f"logprobs and its gradient, G = {G}"] = both
    assert {title: [row[2:24].strip() for row in rows] for title, rows in parts.items()} == wanted
    for rows in parts.values():
        times = [re.fullmatch(r" *([\d.]+) ms +([\d.]+)", row[24:]).groups() for row in rows]
        assert times[0][1] == "1.00" and all(float(ms) > 0 for ms, _ in times)


# fill and compare


@pytest.mark.parametrize(
    "main, arguments, message",
    [
        (fill.main, [], "text"),
        (fill.main, ["c_t", "--k=0"], "--k=0 draws nothing"),
        (fill.main, ["c_t", "--temperature=x"], "temperature='x' is not allowed"),
        (fill.main, ["c_t", "--run=nowhere"], "nowhere is missing; make it again"),
        (compare.main, ["nowhere"], "nowhere holds no run"),
    ],
)
def test_mistakes_exit_2_with_one_line(tmp_path, monkeypatch, capsys, main, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, main, *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("main", [fill.main, compare.main])
def test_help_exits_0(main):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
