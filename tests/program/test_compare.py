"""Check the intervals and verdicts of grpo.experiments.compare, and the averages of text."""

import json

import pytest
import torch
from conftest import encode, write_text

from data.vocabulary import VOCABULARY, decode
from grpo.batch import make_batch
from grpo.experiments import compare, strengths, text
from grpo.policy import Product
from grpo.run.config import Config

A, B = [0.95, 0.96, 0.94, 0.95], [0.90, 0.80, 0.85, 0.87, 0.93]


@pytest.mark.parametrize("df, expected", [(4, 2.776), (9, 2.262)])
def test_students_quantiles_are_those_of_tables(df, expected):
    assert abs(compare.student(df) - expected) < 0.01


def test_welchs_interval_by_hand():
    """Variances of 6.667e-5 and 2.45e-3: a standard error of .02251 and 4.27 degrees of freedom."""
    found, half = compare.difference(A, B)
    assert abs(found - -0.08) < 1e-9 and abs(half - 2.709 * 0.02251) < 5e-4


@pytest.mark.parametrize(
    "other, expected",
    [
        ([0.95, 0.955, 0.945, 0.95], "equal"),
        (B, "worse"),
        ([0.95, 0.70, 0.97, 0.80], "undecided"),
        ([0.925, 0.926, 0.924, 0.925], "worse"),  # by .025, and not within .03 for sure
        ([0.98, 0.961, 0.966, 0.969], "undecided"),  # by .019, as one tuning can be
    ],
)
def test_verdicts(other, expected):
    assert compare.verdict(A, other) == expected


def test_the_first_one_is_the_reference_and_only_what_is_reported_counts(tmp_path, capsys):
    for name, values in ("a", A), ("b", B):
        runs = [{"half": "choose", "tuned": {"kl_beta": 0.1}, "correct": 0.5, "lost": 0.0}]
        for value in values:
            runs.append(
                {"half": "report", "tuned": {"kl_beta": 0.05}, "correct": value, "lost": 0.02}
            )
        lines = "".join(json.dumps(run) + "\n" for run in runs)
        write_text(tmp_path / name / "runs.jsonl", lines)
    compare.main([str(tmp_path / "a"), str(tmp_path / "b")])
    first, second = capsys.readouterr().out.splitlines()[2:]
    assert "| 4 | 0.950 ± 0.013 | 0.020 |" in first
    assert "| 5 | 0.870 ± 0.061 | 0.020 | -0.080 [-0.141, -0.019] | worse |" in second


def test_a_reference_of_one_run_has_no_intervals():
    run = {"half": "report", "correct": 0.5, "lost": 0.0}
    assert compare.row("a", [run], [0.5]) == ["a", "1", "0.500", "0.000"]
    assert compare.row("b", [run, run], [0.5]) == ["b", "2", "0.500 ± 0.000", "0.000"]


def test_a_row_of_runs_has_an_interval_over_blocks_and_over_runs():
    runs = [{"exact": [0.1, 0.3, 0.5]}, {"exact": [0.2, 0.4, 0.3]}]
    halves = compare.interval([0.15, 0.35, 0.4]), compare.interval([0.3, 0.3])
    want = 0.3, (halves[0] ** 2 + halves[1] ** 2) ** 0.5
    assert text.summary(runs)["exact"] == pytest.approx(want)
    assert text.minus(runs[1], runs[0])["exact"] == pytest.approx([0.1, 0.1, -0.2])


def test_each_base_model_has_its_own_reference(tmp_path, capsys):
    runs = []
    for base, arms in {
        "all": {"default": A, "no KL": A},
        "half": {"default": B, "no KL": A},
    }.items():
        for arm, values in arms.items():
            runs += [{"half": "report", "base": base, "arm": arm, "correct": x} for x in values]
    write_text(tmp_path / "runs.jsonl", "".join(json.dumps(run) + "\n" for run in runs))
    compare.main([str(tmp_path / "runs.jsonl")])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert "| half: default | 5 | 0.870 ± 0.061 |" in rows[2] and "+0.080" in rows[3]


def test_what_flips_counts_base_models_not_seeds(tmp_path, monkeypatch, capsys):
    """Weak ones lose .1, .1, .2 and .2 of .5, strong ones nothing: a standard error of .0289."""
    losses = dict(zip(strengths.WEAK, (0.1, 0.1, 0.2, 0.2))) | dict.fromkeys(strengths.STRONG, 0)
    runs = []
    for base, loss in losses.items():
        for arm in strengths.VARIANTS:
            correct = 0.5 if arm == "default" else 0.5 - loss
            for x in (correct - 0.1, correct + 0.1):  # two seeds
                runs.append({"half": "report", "base": base, "arm": arm, "correct": x})
    write_text(tmp_path / "runs.jsonl", "".join(json.dumps(run) + "\n" for run in runs))
    monkeypatch.setattr(strengths, "RESULTS", tmp_path / "runs.jsonl")
    strengths.main(["flips"])
    row = capsys.readouterr().out.splitlines()[2]  # 3 degrees of freedom: 3.18 standard errors
    assert row == ("| no KL | -0.150 ± 0.092 | +0.000 ± 0.000 | -0.150 ± 0.092 | 1.30 | 1.00 |")


def test_a_word_from_a_list_is_the_likeliest_one_and_the_rest_of_the_window_stays():
    tokens = encode("ab cab abc", "bc abc cab")  # (N,T)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[0, :2] = mask[1, 3:6] = True  # `ab` and `abc` are hidden
    batch = make_batch(tokens, mask, 1, (0,))
    logits = torch.zeros(*tokens.shape, len(VOCABULARY))
    for n, t, letter, logit in (0, 0, "c", 3), (0, 1, "b", 1), (1, 3, "b", 2), (1, 5, "c", 4):
        logits[n, t, VOCABULARY.index(letter)] = logit
    q = Product(logits, batch.masked, mask, Config())
    # `ca` gets 3 and `ab` 1; `abc` gets 4 and `bca` 2
    filled = text.listed(q, batch, ["ab", "ca", "abc", "bca", "abcd"])
    assert decode(filled[:, 0]) == ["ca cab abc", "bc abc cab"]
    assert decode(text.listed(q, batch, ["ab", "bca", "abcd"])[:, 0]) == [
        "ab cab abc",
        "bc bca cab",
    ]
