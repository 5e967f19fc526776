import io
import itertools
import json
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from grpo import evaluate
from grpo.evaluate import Evaluation
from grpo.figures import pass_at_k, word_figures
from grpo.plumbing.checkpoint import model_file, write
from grpo.plumbing.config import Config
from grpo.plumbing.setup import load_data
from grpo.referee import ngram, ngram_bits
from grpo.table import (
    COLUMNS,
    ROWS,
    SHORT_COLUMNS,
    SHORT_ROWS,
    USUAL,
    USUAL_INPUTS,
    format_table,
    gap_closed,
    usual,
)
from grpo.words import hidden_words, is_valid, lexicon
from model.transformer import Generator, TransformerConfig

VOCABULARY = " abcdefghijklmnopqrstuvwxyz_"


def encode(*texts):
    return torch.tensor([[VOCABULARY.index(c) for c in text] for text in texts])


def blanks(text):
    return torch.tensor([[c == "_" for c in text]])


def test_hidden_words_are_those_the_window_does_not_cut():
    assert hidden_words("he cat sat o", blanks("__ c_t sat _")[0].numpy()) == [(3, 6)]


def test_word_figures_by_hand():
    words = lexicon("the cat sat on a mat and the cut i x")
    assert words == {"the", "cat", "sat", "on", "mat", "and", "cut", "a", "i"}
    original, mask = encode("the cat sat on it"), blanks("the ___ ___ on it")
    fills = torch.stack(
        [encode("the cut sat on it"), encode("the xyz s t on it")], dim=1
    )  # (1,2,T)
    figures = word_figures(original, mask, fills, VOCABULARY, words)
    assert figures == {
        "valid_words": 2 / 4,
        "exact_words": 1 / 4,
        "distinct_words": 2 / 2,
        "different_valid_words": 2 / 2,
        "any_of_2": 1 / 2,
    }


def test_different_words_in_n_fills_by_hand():
    """Of `cat`: cat, cat, mat, xyz; of `on`: on, on, on, it."""
    words = {"cat", "mat", "on", "it"}
    original, mask = encode("a cat on a"), blanks("a ___ __ a")
    filled = ("a cat on a", "a cat on a", "a mat on a", "a xyz it a")
    fills = torch.stack([encode(text) for text in filled], dim=1)  # (1,4,T)
    figures = word_figures(original, mask, fills, VOCABULARY, words)
    assert figures["different_valid_words"] == (2 + 2) / 2 and figures["any_of_4"] == 1
    assert figures["valid_words"] == 7 / 8 and figures["exact_words"] == 5 / 8
    assert figures["distinct_words"] == 1  # of the first fills: cat, on


def test_a_word_that_runs_into_its_neighbour_is_not_valid():
    assert is_valid("the cat sat", 4, 7, {"cat"}) and not is_valid("the catxsat", 4, 7, {"cat"})


def test_an_apostrophe_stands_within_a_word():
    text = "we don't go"
    assert lexicon(text) == {"we", "don't", "go"} and hidden_words(
        text, np.array([c == "n" for c in text])
    ) == [(3, 8)]
    assert (
        is_valid(text, 3, 8, lexicon(text))
        and not is_valid(text, 3, 6, {"don"})
        and not is_valid(text, 7, 8, {"t"})
    )


def test_ngram_probabilities_add_up_to_one_and_follow_the_text():
    probability = ngram("the cat sat on the mat and the cat ran", 27)
    for h in ("he c", "qzxq", "at r"):
        assert sum(probability(h + c) for c in VOCABULARY[:-1]) == pytest.approx(1)
    assert probability("he ca") > probability("he cz") > 0 and probability("qzxqj") > 0


def test_ngram_probabilities_by_hand():
    """In "abab": a, b twice each; after a always b, twice; after b once a."""
    probability = ngram("abab", 3)
    a = (2 + 2 * 1 / 3) / (4 + 2)
    assert probability("a") == pytest.approx(a)
    assert probability("ba") == pytest.approx((1 + 1 * a) / (1 + 1))
    assert probability("ca") == probability("a")  # c was never seen


def test_ngram_bits_look_at_the_positions_that_touch_a_blank():
    probability = ngram("the cat sat on the mat", 27)
    bits = [
        -np.log2(probability("the cat sat on"[t - 4 : t + 1])) for t in range(4, 11)
    ]  # of 4 to 13
    assert ngram_bits(probability, blanks("the ___ sat on"), ["the cat sat on"]) == pytest.approx(
        np.mean(bits)
    )


@pytest.mark.parametrize("c, k", [(0, 1), (2, 1), (2, 3), (5, 2), (4, 4)])
def test_pass_at_k_by_enumeration(c, k):
    draws = list(itertools.combinations([1] * c + [0] * (5 - c), k))
    assert pass_at_k([c], 5, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


def test_ngram_counts_as_a_loop_does():
    text = "aabab_ b"
    probability = ngram(text, 5)
    count = {gram: sum(text.startswith(gram, i) for i in range(8)) for gram in ("aa", "ab")}
    followed = sum(count.values())
    ab = (count["ab"] + 2 * probability("b")) / (followed + 2)
    assert probability("ab") == pytest.approx(ab)


@pytest.fixture
def settings(world):
    return Config(
        dataset=str(world / "text"),
        generator_checkpoint=str(world / "generator.pt"),
        judge_checkpoint=str(world / "judge.pt"),
        block_size=16,
        masking="span",
        mask_ratio=0.125,
        eval_inputs=4,
        temperature=0.7,
        top_p=1.0,
        device="cpu",
        dtype="float32",
    )


def judge(rows):
    """Any numbers: P(real) of a character is a function of the character."""
    return rows.float() / 8 - 1


def table_policy(n_latent, V, seed):
    """-> the policy whose K rows of logits are every input's, and these rows (K,16,V)."""
    rows = torch.randn(n_latent, 16, V, generator=torch.Generator().manual_seed(seed))
    rows[..., V - 1] = float("-inf")
    return lambda tokens: rows.repeat(len(tokens), 1, 1), rows


@pytest.mark.parametrize("n_latent", [1, 2])
def test_exact_figures_by_enumeration(settings, n_latent):
    """entropy, KL and P(original) of whole inputs, by enumeration of all fills of two blanks."""
    train, val = load_data(settings.dataset, settings.block_size)
    evaluation = Evaluation(settings, judge, train, val, torch.device("cpu"))
    V = len(train.vocabulary)
    policy, rows = table_policy(n_latent, V, 0)
    reference, ref_rows = table_policy(n_latent, V, 1)
    logits, ref_logits = policy(evaluation.tokens), reference(evaluation.tokens)  # (N·K,T,V)
    figures = evaluation.one_step("after", logits, ref_logits)[0]["after_sample"]
    p = (rows / 0.7).softmax(dim=-1)[..., :-1].double()
    r = (ref_rows / 0.7).softmax(dim=-1)[..., :-1].double()
    entropy = kl = log_prob = prob = of_marginal = 0.0
    for tokens, mask in zip(evaluation.tokens, evaluation.mask):
        a, b = mask.nonzero().flatten().tolist()
        mixture = 0
        for z in range(n_latent):
            joint = p[z, a][:, None] * p[z, b]
            other = r[z, a][:, None] * r[z, b]
            mixture = mixture + joint / n_latent
            entropy -= (joint * joint.log()).sum().item() / 4 / n_latent
            kl += (joint * (joint / other).log()).sum().item() / 4 / n_latent
        log_prob += mixture[tokens[a], tokens[b]].log().item() / 4
        prob += mixture[tokens[a], tokens[b]].item() / 4
        for marginal in (mixture.sum(dim=0), mixture.sum(dim=1)):
            of_marginal -= (marginal * marginal.log()).sum().item() / 8
    for name, want in (
        ("sequence_entropy", entropy),
        ("entropy", entropy / 2),
        ("entropy_marginal", of_marginal),
        ("sequence_kl", kl),
        ("original_log_prob", log_prob),
        ("original_prob", prob),
    ):
        assert figures[name] == pytest.approx(want, rel=1e-4), name


@pytest.fixture
def finished(settings, world, tmp_path):
    """A function that makes the folder of a run from changes of its settings -> the folder."""

    def make(n_latent=1, **changes):
        out = tmp_path / "run"
        config = replace(settings, eval_inputs=6, masking="word", mask_ratio=0.15, **changes)
        vocabulary = load_data(config.dataset, 16)[0].vocabulary
        torch.manual_seed(1)
        shape = TransformerConfig(len(vocabulary), 16, 1, 2, 32, n_latent=n_latent)
        content = model_file(Generator(shape), vocabulary)
        if n_latent > 1:
            write(tmp_path / "first.pt", content)
            config.generator_checkpoint = str(tmp_path / "first.pt")
        training = {"optimizer": {}, "iteration": 1, "config": asdict(config), "rng": {}}
        write(out / "checkpoint.pt", content | {"training": training})
        return out

    return make


def result_of(folder):
    return json.loads((folder / "evaluation.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("n_latent", [1, 2])
def test_every_row_and_what_stands_beside_them(finished, n_latent, capsys):
    out = finished(n_latent)
    evaluate.main([str(out)])
    shown = capsys.readouterr().out
    result = result_of(out)
    everywhere = {"judge", "valid_words", "exact_words", "exact_chars", "distinct_words"}
    for name, title in ROWS.items():
        assert everywhere | {"ngram_bits", "forward_passes"} <= result[name].keys()
        assert title in shown
    sampled = {"entropy", "entropy_marginal", "pass@1", "pass@16", "any_of_16"}
    for name in ("before_sample", "after_sample"):
        assert sampled | {"different_valid_words", "original_prob"} <= result[name].keys()
        gap = result[name]["entropy_marginal"] - result[name]["entropy"]
        assert gap == pytest.approx(0, abs=1e-5) if n_latent == 1 else gap > 0
    assert result["before_best_of_16"]["forward_passes"] == 1
    assert result["after_best_of_16"]["judge_passes"] == 16
    passes = [result[f"reference_steps_{n}"]["forward_passes"] for n in (2, 3, 4, 6)]
    assert passes[0] == 2 and passes == sorted(passes)
    assert passes[-1] <= result["reference_sequential_random"]["forward_passes"]
    assert result["n_latent"] == n_latent and result["price_of_independence"].keys() == {
        "before",
        "after",
    }
    evaluate.main([str(out)])
    assert result_of(out) == result  # again, from the files alone


def test_what_a_lower_temperature_trades(finished):
    """At the run's own temperature the same as in its row."""
    out = finished(temperature=0.8)
    evaluate.main([str(out)])
    result = result_of(out)
    rows = result["before_at_temperatures"]
    assert [row["temperature"] for row in rows] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert {"valid_words", "different_valid_words"} <= rows[3].keys()
    assert rows[3].items() <= (result["before_sample"] | {"temperature": 0.8}).items()


def test_best_of_16_pleases_the_judge_more_than_the_samples_it_is_made_of(finished):
    out = finished()
    evaluate.main([str(out)])
    result = result_of(out)
    for name in ("before", "after"):
        assert result[f"{name}_best_of_16"]["judge"] > result[f"{name}_sample"]["judge"]


def test_another_table_is_printed_and_does_not_replace_the_runs_own(finished, tmp_path, capsys):
    out = finished()
    evaluate.main([str(out)])
    own = (out / "evaluation.json").read_bytes()
    completions = (out / "completions.jsonl").read_bytes()
    first = capsys.readouterr().out
    for flags in (["--eval_seed=1"], ["--eval_inputs=5"]):
        evaluate.main([str(out), *flags, f"--json={tmp_path}/other.json"])
        other = json.loads((tmp_path / "other.json").read_text())
        assert other["held_out"] != json.loads(own)["held_out"]
        assert capsys.readouterr().out != first
    assert (other["inputs"], json.loads(own)["inputs"]) == (5, 6)
    assert (out / "evaluation.json").read_bytes() == own
    assert (out / "completions.jsonl").read_bytes() == completions
    evaluate.main([str(out), f"--eval_seed={evaluate.EVALUATION_SEED}", "--eval_inputs=6"])
    assert capsys.readouterr().out == first


def test_code_that_a_checkpoint_names_is_not_run(finished, tmp_path, capsys):
    evil = tmp_path / "evil.py"
    evil.write_text(
        f"open({str(tmp_path / 'owned')!r}, 'w').close()\n"
        "def half(completions, masked, mask, decode):\n"
        "    return [[0.5 for _ in row] for row in completions]\n"
    )
    out = finished(reward=f"judge:1.0,{evil}:half:2.0")
    evaluate.main([str(out)])
    shown = capsys.readouterr().out
    assert f"left out: {evil}:half" in shown and "--reward=" in shown
    assert not (tmp_path / "owned").exists()
    assert not (out / "evaluation.json").exists()  # not the run's own table
    evaluate.main([str(out), "--reward=valid_words"])
    assert capsys.readouterr().out.count("left out") == 1  # the judge is no code
    assert not (tmp_path / "owned").exists() and not (out / "evaluation.json").exists()
    evaluate.main([str(out), f"--reward=judge:1.0,{evil}:half:2.0"])
    assert (tmp_path / "owned").exists() and "left out" not in capsys.readouterr().out
    assert result_of(out)["after_sample"]["reward_half"] == 0.5
    line = json.loads((out / "completions.jsonl").read_text().splitlines()[0])
    assert line.keys() == {"input", "completion", "judge", "half"}


def test_before_is_the_generator_that_the_run_began_with(finished, world, tmp_path):
    out = finished()
    evaluate.main([str(out)])
    own = result_of(out)
    torch.manual_seed(7)
    vocabulary = load_data(str(world / "text"), 16)[0].vocabulary
    other = Generator(TransformerConfig(len(vocabulary), 16, 1, 2, 32))
    write(tmp_path / "other.pt", model_file(other, vocabulary))
    evaluate.main([str(finished(reference_checkpoint=str(tmp_path / "other.pt")))])
    assert result_of(out) == own


def test_the_runs_own_device_unless_another_is_named(finished, capsys):
    out = finished(device="cuda:9")
    with pytest.raises(SystemExit) as stopped:
        evaluate.main([str(out)])
    assert stopped.value.code == 2 and "device='cuda:9' is not on" in capsys.readouterr().err
    evaluate.main([str(out), "--device=cpu"])
    assert (out / "evaluation.json").exists()


def test_models_and_text_are_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = evaluate.find(Config.generator_checkpoint)
    assert found.is_absolute() and found.exists()
    (tmp_path / "model" / "pretrained").mkdir(parents=True)
    (tmp_path / "model" / "pretrained" / "generator.pt").touch()
    assert str(evaluate.find(Config.generator_checkpoint)) == Config.generator_checkpoint
    assert str(evaluate.find("no/such.pt")) == "no/such.pt"


@pytest.mark.parametrize("flag", ["--eval_inputs=0", "--eval_seed=-1", "--eval_seed=x"])
def test_mistakes_exit_2_with_one_line(finished, flag, capsys):
    with pytest.raises(SystemExit) as stopped:
        evaluate.main([str(finished()), flag])
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and not shown.out and shown.err.count("\n") == 1
    assert flag[2:9] in shown.err


def rows_of(**valid):
    row = {name: 0.5 for name in COLUMNS}
    rows = {name: row | {"valid_words": valid.get(name, 0.5)} for name in ROWS}
    prices = {"before": 2.0, "after": 1.0}
    return rows | {"gap_closed": gap_closed(rows), "price_of_independence": prices}


@pytest.mark.parametrize("surest, gap", [(0.9, 0.5), (0.5, None), (0.3, None)])
def test_there_is_a_gap_only_where_surest_first_is_better(surest, gap):
    rows = rows_of(after_sample=0.7, reference_sequential_confident=surest)
    assert rows["gap_closed"] == (gap and pytest.approx(gap))
    assert f"gap closed: {gap or 'undefined'}" in format_table(rows).replace("0.50", "0.5")


def test_a_fooled_judge_is_named():
    rows = rows_of()
    told = "the judge prefers these fills to the original text: it is being fooled"
    assert told not in format_table(rows)
    rows["after_sample"] = rows["after_sample"] | {"judge": 0.51}
    assert told in format_table(rows).splitlines()


def test_the_table_of_a_run_fits_80_columns():
    lines = format_table(rows_of(), SHORT_ROWS, SHORT_COLUMNS).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) == len(SHORT_ROWS) + 3
    assert ROWS["before_argmax"] in lines[3]
    del (rows := rows_of())["after_best_of_16"]  # written by an older program
    assert ROWS["after_best_of_16"] not in format_table(rows)


def test_the_users_own_prompts_are_shown(settings, tmp_path):
    """In peeks and in completions.jsonl, without what follows a short one; the table stays."""
    prompts = ["th_ c_t", "the ___ cat sat", "_"]
    (tmp_path / "p.json").write_text(json.dumps({"prompts": prompts}))
    config = replace(settings, prompts_file=str(tmp_path / "p.json"))
    policy, _ = table_policy(2, 28, 0)
    tables = []
    for each in (settings, config):
        train, val = load_data(each.dataset, each.block_size, each.prompts_file)
        evaluation = Evaluation(each, judge, train, val, torch.device("cpu"))
        rows, completions = evaluation.table(policy, policy)
        tables.append(rows)
    assert tables[0] == tables[1]
    assert [line["input"] for line in completions] == [text for text in prompts for _ in range(16)]
    for line in completions:
        assert len(line["completion"]) == len(line["input"]) and "_" not in line["completion"]
        assert all(a in ("_", b) for a, b in zip(line["input"], line["completion"]))
    title, *shown = evaluation.peek(policy, policy, 3).splitlines()
    assert title.startswith("step 3: valid words on held-out text") and len(shown) == 9
    assert [line.split(maxsplit=1) for line in shown[::3]] == [
        ["text", "th[_] c[_]t"],
        ["text", "the [___] cat sat"],
        ["text", "[_]"],
    ]
    assert [line.split()[0] for line in shown[:3]] == ["text", "before", "now"]


def test_a_peek_without_prompts_shows_the_text(settings):
    train, val = load_data(settings.dataset, settings.block_size)
    evaluation = Evaluation(settings, judge, train, val, torch.device("cpu"))
    policy, _ = table_policy(1, 28, 0)
    shown = evaluation.peek(policy, policy, 0).splitlines()[1:]
    assert len(shown) == 3 * 4
    original = train.decode(evaluation.tokens[0])
    assert shown[0].replace("[", "").replace("]", "") == f"  text   {original}"
    assert shown[1].replace("before ", "") == shown[2].replace("now    ", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_names_each_step_and_moves_within_it(settings, monkeypatch):
    """On a terminal; elsewhere nothing is shown."""
    train, val = load_data(settings.dataset, settings.block_size)
    evaluation = Evaluation(settings, judge, train, val, torch.device("cpu"))
    policy, _ = table_policy(1, 28, 0)
    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", terminal)
        evaluation.table(policy, policy)
        shown = terminal.getvalue()
        if terminal.isatty():
            # When it begins, in the second pass (two blanks are hidden), and as it is judged.
            assert shown.count("table: before, in 6 passes") >= 3
            assert "11/11" in shown and "table: the price of independence" in shown
        else:
            assert shown == ""


def test_a_run_is_put_beside_six_others_and_their_text():
    row = {name: low for name, (low, _) in USUAL.items()}
    result = {"after_sample": row, "held_out": USUAL_INPUTS}
    assert usual(result) == "within the range of six other seeds"
    far = result | {"after_sample": row | {"ngram_bits": 9.0}}
    assert usual(far) == "outside the range of six other seeds: bits 9.000 (3.08 to 3.36)"
    elsewhere = usual(far | {"held_out": "another"})
    assert elsewhere.startswith(
        "outside the range of six other seeds on the text of another Python"
    )
