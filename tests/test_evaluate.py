import itertools

import numpy as np
import pytest
import torch

from grpo.evaluate import (
    Evaluation,
    fill_sequential,
    hidden_words,
    is_valid,
    lexicon,
    ngram,
    ngram_bits,
    pass_at_k,
    word_figures,
)
from grpo.plumbing.config import Config
from grpo.plumbing.setup import load_data

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
    assert figures == {"valid_words": 2 / 4, "exact_words": 1 / 4, "distinct_words": 2 / 2}


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


@pytest.mark.parametrize("order", ["random", "confident"])
def test_sequential_filling_takes_a_pass_per_blank_and_sees_what_it_filled(order):
    calls = []

    def copycat(tokens):
        """Surely the same character as the visible ones."""
        calls.append(tokens.clone())
        seen = torch.where(tokens == 27, 0, tokens).amax(dim=1)  # (N,)
        logits = torch.zeros(*tokens.shape, 28)
        logits[..., 27] = float("-inf")
        return logits.scatter_add(
            2,
            seen[:, None, None].expand(-1, tokens.shape[1], 1),
            torch.full((len(tokens), tokens.shape[1], 1), 60.0),
        )

    masked = encode("a____", "bb___")
    fills = fill_sequential(copycat, masked, masked == 27, order, Config(), 0)
    assert fills[:, 0].tolist() == encode("aaaaa", "bbbbb").tolist()
    assert [len(c) for c in calls] == [2, 2, 2, 1]  # a finished input is not run again
    assert [(c[0] == 27).sum().item() for c in calls] == [4, 3, 2, 1]


def test_confident_takes_the_surest_blank_first():
    order = []

    def model(tokens):
        order.append((tokens[0] == 27).nonzero().squeeze(1).tolist())
        logits = torch.zeros(1, 4, 28)
        for t, sharpness in enumerate([1.0, 3.0, 2.0, 4.0]):
            logits[0, t, 5] = sharpness
        return logits

    fill_sequential(
        model, torch.full((1, 4), 27), torch.ones(1, 4, dtype=torch.bool), "confident", Config(), 0
    )
    assert order == [[0, 1, 2, 3], [0, 1, 2], [0, 2], [0]]


def test_exact_probability_of_the_original(world):
    """entropy, KL and P(original) of whole inputs, by enumeration of all fills of two blanks; 16 draws find the original as often."""
    config = Config(
        dataset=str(world / "text"),
        block_size=16,
        masking="span",
        mask_ratio=0.125,
        eval_inputs=4,
        temperature=0.7,
    )
    train, val = load_data(config.dataset, config.block_size)
    judge = lambda rows: rows.float()  # noqa: E731
    evaluation = Evaluation(config, judge, train, val, torch.device("cpu"))
    V = len(train.vocabulary)
    tables = [
        torch.randn(16, V, generator=torch.Generator().manual_seed(i)).index_fill(
            1, torch.tensor(V - 1), float("-inf")
        )
        for i in range(2)
    ]
    models = [lambda rows, table=table: table.expand(len(rows), 16, V) for table in tables]
    ref_log_p, _ = evaluation.one_step(models[1], "before")
    figures = evaluation.one_step(models[0], "after", ref_log_p)[1]["after_sample"]
    p, r = ((table / 0.7).softmax(dim=-1)[:, :-1].double() for table in tables)
    entropy = kl = log_prob = prob = 0.0
    for tokens, mask in zip(evaluation.tokens, evaluation.mask):
        a, b = mask.nonzero().flatten().tolist()
        joint, other = p[a][:, None] * p[b], r[a][:, None] * r[b]
        entropy, kl = (
            entropy - (joint * joint.log()).sum().item() / 4,
            kl + (joint * (joint / other).log()).sum().item() / 4,
        )
        log_prob, prob = (
            log_prob + joint[tokens[a], tokens[b]].log().item() / 4,
            prob + joint[tokens[a], tokens[b]].item() / 4,
        )
    for name, want in (
        ("sequence_entropy", entropy),
        ("sequence_kl", kl),
        ("original_log_prob", log_prob),
        ("original_prob", prob),
    ):
        assert figures[name] == pytest.approx(want, rel=1e-4), name
