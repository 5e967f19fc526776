import math
import re

import pytest
import torch

from grpo import fill
from grpo.plumbing.checkpoint import load_model, model_file, read, write
from model.transformer import Generator, TransformerConfig


@pytest.fixture
def files(world):
    return [f"--before={world}/generator.pt", f"--judge={world}/judge.pt"]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder without out/checkpoint.pt."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def coin(world, tmp_path):
    """The file of a generator with a latent of two values."""
    vocabulary = read(world / "generator.pt")["vocabulary"]
    torch.manual_seed(3)
    shape = TransformerConfig(len(vocabulary), 16, 1, 2, 32, n_latent=2)
    generator = Generator(shape)
    torch.nn.init.normal_(generator.head.weight, std=0.2)  # the two values say different things
    write(tmp_path / "coin.pt", model_file(generator, vocabulary))
    return tmp_path / "coin.pt"


def test_in_a_program_of_ones_own(world):
    """The lines of the file's docstring, with a file that is there."""
    generator, vocabulary = fill.load(world / "generator.pt")
    fills = fill.fill(generator, vocabulary, "a c_t", k=3)
    assert sum(one.drawn for one in fills) == 3
    for one in fills:
        assert re.fullmatch("a c[a-z ]t", one.text) and one.log_prob < 0


@pytest.mark.parametrize("n_latent", [1, 2])
def test_probabilities_are_those_of_the_mixture(world, coin, n_latent):
    generator, vocabulary = fill.load(coin if n_latent == 2 else world / "generator.pt")
    text = "a c_t s_t"
    fills = fill.fill(generator, vocabulary, text, 200, 0.7, 1)
    masked = fill.tokenise(text, vocabulary, 16)[None]
    with torch.no_grad():
        q = (generator(masked).double() / 0.7).softmax(dim=-1)  # (K,T,V)
    assert len(q) == n_latent
    for one in fills:
        a, b = vocabulary.index(one.text[3]), vocabulary.index(one.text[7])
        of_z = q[:, 3, a] * q[:, 7, b]
        assert math.exp(one.log_prob) == pytest.approx(of_z.mean().item())
        assert one.z == of_z.argmax()
        assert re.fullmatch("a c[a-z ]t s[a-z ]t", one.text)
    assert sum(one.drawn for one in fills) == 200 and max(one.drawn for one in fills) > 1
    assert len({one.text for one in fills}) == len(fills) < 200
    assert [one.log_prob for one in fills] == sorted([one.log_prob for one in fills], reverse=True)


def test_the_surer_the_fewer(world):
    fills = fill.fill(*fill.load(world / "generator.pt"), "a c_t", 7, 1e-3, 1)
    assert [one.drawn for one in fills] == [7] and fills[0].log_prob > math.log(0.9)


@pytest.mark.parametrize(
    "p, shown",
    [
        (math.log(0.25), "0.250"),
        (math.log(0.0123), "0.012"),
        (math.log(3e-4), "3.0e-4"),
        (-2000.0, "2.6e-869"),
        (-1e-9, "1-1e-9"),
        (-4e-4, "1-4e-4"),
        (0.0, "1-1e-16"),
        (math.log(0.9994), "0.999"),
    ],
)
def test_a_probability_is_never_shown_as_0_or_1(p, shown):
    assert fill.as_power(p) == shown


def test_before_and_after_in_a_pipe(files, world, elsewhere, capsys):
    fill.main(["the c_t _at", "--k=4", *files])
    before = capsys.readouterr().out.splitlines()
    title, heads, *rows, nothing = before
    assert title == f"before  {world}/generator.pt"
    assert heads.split() == ["probability", "judge", "drawn"]
    row_pattern = r" +\S+  [01]\.\d{3}   +\d/4  the c\[[a-z ]\]t \[[a-z ]\]at"
    assert rows and all(re.fullmatch(row_pattern, row) for row in rows)
    assert nothing.startswith(f"after   none: there is no {elsewhere}/out/checkpoint.pt")
    fill.main(["the c_t _at", "--k=4", f"--checkpoint={world}/generator.pt", *files])
    both = capsys.readouterr().out.splitlines()
    # The same model, the same draws.
    again = [title.replace("before ", "after  "), heads, *rows]
    assert both == [title, heads, *rows, *again]
    fill.main(["the c_t _at", "--k=4", "--seed=2", *files])
    assert capsys.readouterr().out.splitlines() != before


def test_which_z_spoke_is_shown_where_there_is_one(files, coin, capsys):
    fill.main(["the c_t", "--k=9", f"--checkpoint={coin}", *files])
    lines = capsys.readouterr().out.splitlines()
    second = lines.index(f"after   {coin}")
    assert lines[1].split() == ["probability", "judge", "drawn"]
    assert lines[second + 1].split() == ["probability", "judge", "drawn", "z"]
    spoken = {re.search(r"/9   ([01])  the", line)[1] for line in lines[second + 2 :]}
    assert spoken == {"0", "1"}


def test_the_runs_own_checkpoint_is_found(files, world, elsewhere, capsys):
    (elsewhere / "out").mkdir()
    (elsewhere / "out" / "checkpoint.pt").write_bytes((world / "generator.pt").read_bytes())
    fill.main(["th_", *files])
    lines = capsys.readouterr().out.splitlines()
    assert "after   out/checkpoint.pt" in lines and not lines[-1].startswith("after   none")


def test_several_texts_and_a_file(files, elsewhere, capsys):
    (elsewhere / "texts").write_text("th_\n\nc_t\n")
    fill.main(["a _", "--k=1", "--file=texts", *files])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("text ")] == [
        "text    a _",
        "text    th_",
        "text    c_t",
    ]


def test_a_text_is_read_as_the_models_text_was_written(files, elsewhere, capsys):
    fill.main(["  The C_t,\t2 d_gs & Él_!", "--k=1", *files])
    shown = capsys.readouterr().out
    assert shown.startswith("text    the c_t d_gs el_\n")
    fill.main(["the c_t", "--k=1", *files])
    assert "text " not in capsys.readouterr().out  # nothing to say


@pytest.mark.parametrize(
    "given, clean",
    [("a__ _b", "a__ _b"), ("_ _", "_ _"), ("x-_-y", "x _ y"), (" _ ", "_"), ("A1_", "a _")],
)
def test_what_stands_between_blanks_stays(given, clean):
    assert fill.clean(given, " abcdefghijklmnopqrstuvwxyz_") == clean


def test_another_alphabet_is_left_as_it_is():
    assert fill.clean("The C_t!", " CTeht!_") == "The C_t!"


@pytest.mark.parametrize(
    "text, told",
    [
        ("the c#t", "has '#'; it takes the characters ' abc_'"),
        ("", "has 0 characters; it takes 1 to 5"),
        ("a_b_ab", "has 6 characters; it takes 1 to 5"),
    ],
)
def test_the_rule_that_a_text_breaks_is_named(text, told):
    text = text.translate(str.maketrans("thecdefg", "abcaabca")) if "#" in text else text
    with pytest.raises(ValueError, match=re.escape(told)):
        fill.tokenise(text, " abc_", 5)


def test_a_text_without_blanks_shows_the_judges_view(files, world, elsewhere, capsys):
    fill.main(["the cat", *files])
    shown = capsys.readouterr().out
    vocabulary = read(world / "generator.pt")["vocabulary"]
    judge = load_model(world / "judge.pt", "judge", vocabulary)
    with torch.no_grad():
        score = judge(fill.tokenise("the cat", vocabulary, 16)[None]).sigmoid().mean()
    assert f"no blank (_) to fill; judge {score:.3f}  the cat" in shown


def test_on_a_terminal_the_judge_shades(monkeypatch):
    monkeypatch.setattr(fill, "colours", lambda: True)
    shown = fill.shade("cat", [False, True, False], [0.0, 0.5, 1.0])
    assert re.sub(r"\033\[[\d;]*m", "", shown) == "cat"
    assert [int(red) for red in re.findall(r"48;5;(\d+)m", shown)] == [16, 88, 196]
    assert shown.count("\033[4;") == 1


def test_the_shades_are_relative():
    """A judge who doubts everything a little still shows what it doubts most."""
    doubts = fill.relative(torch.tensor([[0.30, 0.25], [0.20, 0.30]]))
    torch.testing.assert_close(doubts, torch.tensor([[0.0, 0.5], [1.0, 0.0]]))
    assert (fill.relative(torch.full((1, 3), 0.4)) == 0).all()


@pytest.mark.parametrize(
    "arguments, told",
    [([], "there is no text"), (["--file=no"], "no"), (["c_t", "--k=0"], "k=0 is not allowed")],
)
def test_mistakes_exit_2_with_one_line(files, elsewhere, arguments, told, capsys):
    with pytest.raises(SystemExit) as stopped:
        fill.main([*arguments, *files])
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and not shown.out
    assert told in shown.err and shown.err.count("\n") == 1


def test_help_exits_0():
    with pytest.raises(SystemExit) as stopped:
        fill.main(["--help"])
    assert stopped.value.code == 0
