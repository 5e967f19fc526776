"""Run fill by its command, on a run of tiny models."""

import math

import pytest
import torch
from conftest import WORDS, run

from data.dataset import encode_prompt
from data.user_mistake import Mistake
from data.vocabulary import VOCABULARY, encode
from grpo.run.checkpoint import load_model
from grpo.run.config import Config
from grpo.run.load import make_policy
from grpo.tools import fill
from model.transformer import Generator, Judge


@pytest.fixture
def trained(flags, tmp_path, monkeypatch):
    """Go to a folder of its own, and make a run in `a` there."""
    monkeypatch.chdir(tmp_path)
    run(flags, out_dir="a", max_iters=1)


def printed(capsys, *arguments):
    """Run fill: -> {title: [the lines below it]}."""
    capsys.readouterr()
    fill.main(list(arguments))
    parts = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  "):
            [*parts.values()][-1].append(line)
        else:
            parts[line] = []
    return parts


@pytest.mark.parametrize("kind, temperature", [("generator", 0.5), ("latent", 2.0)])
def test_the_fills_are_the_top_k_of_all_fills_with_their_exact_probabilities(
    world, kind, temperature
):
    """A latent draws the two blanks of h_l_ together."""
    generator = load_model(world / f"{kind}.pt", Generator)
    torch.manual_seed(0)
    torch.nn.init.normal_(generator.head.weight)  # so that the values of the latent differ
    policy = make_policy(generator, Config(temperature=temperature), torch.device("cpu"))
    masked = encode_prompt("h_l_ me", 16, "text")  # (T,)
    with torch.no_grad():
        out = generator(masked[None])
    prior, letters = out if kind == "latent" else (torch.zeros(1, 1), out)
    q = (letters / temperature).softmax(dim=-1)[0].view(7, -1, 28)  # (T,K,V)
    p_z = (prior / temperature).softmax(dim=-1)  # (1,K)
    both = torch.einsum("k,ka,kb->ab", p_z[0], q[1], q[3])  # (V,V)
    p, order = both.flatten().sort(descending=True)
    texts = [f"h{VOCABULARY[i // 28]}l{VOCABULARY[i % 28]} me" for i in order.tolist()]
    for k in (1, 200):
        found = fill.fill(policy, masked, k)
        assert [text for text, _ in found] == texts[:k]
        torch.testing.assert_close(torch.tensor([x for _, x in found]), p[:k].log())


def test_a_run_is_shown_before_and_after_with_what_its_rule_and_its_judge_say(
    trained, world, capsys
):
    parts = printed(capsys, "the c_t _at", "--run=a", "--k=20")
    assert list(parts) == [f"before  {world}/generator.pt", "after   a"]
    judge = load_model(world / "judge.pt", Judge)
    masked = encode_prompt("the c_t _at", 16, "text")
    for path, (_, *rows) in zip((world / "generator.pt", "a/checkpoint.pt"), parts.values()):
        expected = []
        policy = make_policy(
            load_model(path, Generator), Config(temperature=0.8), torch.device("cpu")
        )
        for text, log_prob in fill.fill(policy, masked, 20):
            with torch.no_grad():
                logits = judge(encode(text)[None])[0]
            valid = "valid" if {*text.split()} <= {*WORDS} else "wrong"
            judged = "accepted" if logits[5] + logits[8] > 0 else "rejected"
            shown = f"the c[{text[5]}]t [{text[8]}]at"
            expected.append(f"{math.exp(log_prob):.2g}  {valid}  {judged}  {shown}")
        assert [row.strip() for row in rows] == expected
        assert all(word in "".join(rows) for word in ("accepted", "rejected"))


def test_a_text_that_cannot_be_filled_is_named(trained):
    with pytest.raises(Mistake, match="text 'th_ Ä' can't be filled"):
        fill.main(["th_ Ä", "--run=a"])
