"""Make tiny data and tiny models for the tests: 2 layers, width 32, 16 characters."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_grpo
from data import vocabulary
from data.rules import Rule
from grpo import batch
from grpo.run.checkpoint import model_file, read, write
from model.transformer import Judge, TransformerConfig, make_generator

# Tiny nets gain nothing from a second thread, here and in the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
os.environ.setdefault("WANDB_MODE", "offline")
# Tests that a shell starts in the background ignore SIGINT. So we put Python's own handler back.
signal.signal(signal.SIGINT, signal.default_int_handler)

WORDS = (
    "the old red big cat cow dog hen sat on mat hat and rat bee fox ran to us me it number".split()
)
rng = random.Random(0)
PARAGRAPHS = [" ".join(rng.choices(WORDS, k=14)) for _ in range(220)]

BLANK = vocabulary.MASK_ID

BROWSER = shutil.which("chromium")
OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --virtual-time-budget=20000 --dump-dom"""
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs chromium")


def encode(*texts):
    """Turn texts of equal length into tokens: -> (number of texts,T)."""
    return torch.stack([vocabulary.encode(text) for text in texts])


def numbers(seed, *shape):
    """Make normally distributed random numbers, in float64."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


class Letters(Rule):
    """All that's hidden has to be one of the characters of `allowed`."""

    name = "letters"

    def __init__(self, allowed):
        self.allowed = allowed

    def is_good(self, completion, masked):
        return all(c in self.allowed for c, m in zip(completion, masked) if m == vocabulary.BLANK)


def make_batch(tokens, mask, mask_id, G, seed):
    """Make a batch with a mask token of its own."""
    made = batch.make_batch(tokens, mask, G, seed)
    return replace(made, masked=tokens.masked_fill(mask, mask_id))


def write_text(path, text):
    """Write a file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_lines(folder, train, val):
    """Write a dataset of lines: -> its folder, as a text."""
    write_text(folder / "train.txt", "\n".join(train))
    write_text(folder / "val.txt", "\n".join(val))
    return str(folder)


# The tiny runs use these in the place of the defaults: plain GRPO with one update per step.
PLAIN = {
    "temperature": 0.8,
    "top_p": 0.95,
    "kl_beta": 0.1,
    "baseline": "mean",
    "scale_rewards": "group",
    "num_iterations": 1,
    "warmup_iters": 0,
    "eval_interval": 50,
}


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Make a folder with a text and untrained models.

    They are a judge, and generators: two like the judge, one with a latent, and one that knows more
    characters. The held-out paragraphs have a word of their own.
    """
    folder = tmp_path_factory.mktemp("world")
    train = [p for i, p in enumerate(PARAGRAPHS) if i % 10]
    write_lines(folder / "text", train, [*PARAGRAPHS[::10], "zebra"])
    torch.manual_seed(0)
    shape = TransformerConfig(block_size=16, n_layer=2, n_head=2, n_embd=32)
    judge = Judge(shape)
    torch.nn.init.normal_(judge.head.weight)  # with its initial zeros, all scores are equal
    others = {"latent": {"n_latent": 2}, "other": {}, "digits": {"vocab_size": 40}}
    for name, changes in {"generator": {}, **others}.items():
        write(folder / f"{name}.pt", model_file(make_generator(replace(shape, **changes))))
    write(folder / "judge.pt", model_file(judge))
    return folder


@pytest.fixture
def flags(world, tmp_path):
    """Give the settings of a run that takes seconds: {name: value}."""
    return PLAIN | {
        "dataset": str(world / "text"),
        "generator_checkpoint": str(world / "generator.pt"),
        "judge_checkpoint": str(world / "judge.pt"),
        "out_dir": str(tmp_path / "out"),
        "block_size": 16,
        "masking": "word:0.7,random:0.3",
        "batch_size": 4,
        "group_size": 4,
        "max_iters": 4,
        "learning_rate": 1e-2,
        "eval_inputs": 8,
        "device": "cpu",
    }


@pytest.fixture(scope="session")
def server():
    """Make a context whose processes are forked from one that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_grpo", "torch._dynamo"])  # AdamW imports the second
    return context


def browse(html, folder, anchor=""):
    """Open a page in the browser: -> its HTML, as it is 20 seconds later by the page's clock."""
    (folder / "page.html").write_text(html, encoding="utf-8")
    address = f"file://{folder}/page.html{anchor}"
    command = [BROWSER, *OPTIONS.split(), f"--user-data-dir={folder}/browser", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def command_line(flags, **changes):
    return [f"--{name}={value}" for name, value in (flags | changes).items()]


def run(flags, **changes):
    """Make a whole run: -> its checkpoint, and its metrics without the times."""
    train_grpo.main(command_line(flags, **changes))
    out = Path((flags | changes)["out_dir"])
    return read(out / "checkpoint.pt"), figures(out)


def contents(folder):
    """Read all files of a folder: -> {name: bytes}."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def read_json(path):
    return json.loads(Path(path).read_bytes())


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


def figures(folder):
    """Read the lines of metrics.jsonl, without the times."""
    steps = read_jsonl(Path(folder) / "metrics.jsonl")
    return [{k: v for k, v in step.items() if not k.endswith("_ms")} for step in steps]


def same(a, b):
    """Tell whether two things are equal bit for bit, whatever is nested in them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
