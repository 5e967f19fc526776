"""Whatever a user gets wrong, in whichever program, is one line, and not a byte is written.

Exit code 2, the line on stderr, and in it the value and the mend.
"""

import copy
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_grpo
from data.char_diffusion import prepare
from grpo import bench, compare, evaluate, fill
from grpo.plumbing.checkpoint import model_file, read, write
from model import pretrain
from model.transformer import Generator, Judge, TransformerConfig
from tests.conftest import PLAIN, command_line

PROGRAMS = {
    "train_grpo.py": train_grpo.main,
    "data/char_diffusion/prepare.py": prepare.main,
    "-m grpo.evaluate": evaluate.main,
    "-m grpo.fill": fill.main,
    "-m grpo.compare": compare.main,
    "-m grpo.bench": bench.main,
    "-m model.pretrain": pretrain.main,
}

# A setting's mistake -> what its line says. The line also holds the flag's own value, see below.
SETTINGS = {
    "--grup_size=8": "did you mean 'group_size'",
    "--banana=1": "no setting 'banana'; python train_grpo.py --help lists them all",
    "--group_size": "--group_size=VALUE",
    "--group_size=": "whole number from 2 to 1024",
    "--group_size=many": "whole number",
    "--group_size=8.5": "whole number",
    "--group_size=1": "from 2 to 1024",
    "--group_size=2000": "from 2 to 1024",
    f"--batch_size={10**30}": "whole number of 1 or more",
    "--batch_size=1000000 --group_size=1024 --block_size=1000000": "characters a step; at most",
    "--temperature=0": "a number from",
    "--temperature=hot": "a number",
    "--temperature=nan": "a number",
    "--temperature=inf": "a number",
    "--top_p=0": "a number from",
    "--top_p=1.5": "a number from",
    "--top_k=-1": "0 or more",
    "--min_p=2": "a number from",
    "--kl_beta=-1": "0.0 or more",
    "--kl_target=-1": "0.0 or more",
    "--kl_estimator=k4": "exact, k1, k2, k3",
    "--loss_type=ppo": "grpo, dapo",
    "--baseline=median": "mean, leave_one_out",
    "--scale_rewards=yes": "group, batch, none",
    "--importance_sampling_level=word": "token, sequence, none",
    "--masking=words": "random, span, word, short, sticky",
    "--masking=word:-1": "WEIGHT >= 0",
    "--masking=word,span,word:2": "each once",
    "--masking=word:0": "no positive weight; write",
    "--masking=": "random, span, word, short, sticky",
    "--mask_ratio=1.5": "from 0.0 to 1.0",
    "--hidden_words=0": "1 or more",
    "--batch_size=0": "1 or more",
    "--gradient_accumulation_steps=0": "1 or more",
    "--block_size=1": "5 or more",
    "--out_dir=": "names no folder; write",
    "--max_iters=0": "1 or more",
    "--learning_rate=-1": "0.0 or more",
    "--min_lr=1": "above learning_rate=0.01; lower min_lr",
    "--warmup_iters=1000": "warmup_iters=1000 is more than max_iters=4; lower warmup_iters",
    "--beta1=1": "from 0.0 to",
    "--grad_clip=-1": "0.0 or more",
    "--clip_eps=2": "from 0.0 to 1.0",
    "--num_iterations=0": "1 or more",
    "--save_interval=0": "1 or more",
    "--log_interval=0": "1 or more",
    "--eval_interval=0": "1 or more",
    "--eval_inputs=0": "1 or more",
    "--wandb_log=maybe": "true or false",
    "--compile=maybe": "auto, true, false",
    "--dtype=float8": "float32, bfloat16",
    "--dtype=float16": "auto, float32, bfloat16",
    "--init_from=scratch": "pretrained, resume",
    "--seed=-1": "of 0 or more, below 2**31",
    "--seed=1e3": "whole number",
    "--clip_delta=1.1": "more than 1 + clip_eps_high",
    "--minibatch_size=3": "a divisor of 4",
    "--top_entropy_quantile=0": "a number from",
    "--reference_mode=moving": "static, ema, periodic",
    "--xtc_probability=2": "from 0.0 to 1.0",
    "--repetition_penalty=0": "a number from",
    "--reward=": "judge, valid_words, FILE.py:FUNCTION, or JUDGE.pt",
    "--reward=jugde": "judge, valid_words, FILE.py",
    "--reward=judge:heavy": "judge, valid_words, FILE.py",
    "--reward=judge:1,judge:2": "each NAME once",
    "--reward=judge:0": "no part of a weight other than 0",
    "--reward=a.py:f,b.py:f": "two parts of one name",
    "--reward=a.py:": "FILE.py:FUNCTION",
    "--reward=a.py:input": "no part may be called 'input', as a column of completions.jsonl",
    "--reward=judge,a.py:completion": "called 'completion'",
    "--reward=a.py:judge": "called 'judge'",
    "--device=banana": ": device='banana' is not on this machine; device takes auto or one of: cpu",
    "--device=cuda:99": ": device='cuda:99' is not",
    "--device=meta": "takes auto or one of: cpu",
    "--reference_device=tpu": "reference_device='tpu' is not on this machine; reference_device "
    "takes auto or",
    "--kernel=triton": "auto, cuda, torch",
    "--kernel=cuda": "set kernel to 'auto' or 'torch'",
    # combinations that mean nothing
    "--ema_alpha=0.5": "needs reference_mode=ema; set that, or leave",
    "--reference_update_freq=3": "needs reference_mode=periodic",
    "--xtc_threshold=0.2": "needs xtc_probability above 0",
    "--importance_sampling_level=none --num_iterations=2": "leave num_iterations at 1",
    "--kl_estimator=k3 --kl_of=marginal": "needs kl_estimator=exact",
    "--kl_of=input": "row, marginal",
    "--importance_sampling_level=none --minibatch_size=2": "leave minibatch_size at 0",
    "--importance_sampling_level=none --clip_eps=0.1": "needs the ratio",
    "--importance_sampling_level=none --clip_eps_high=0.1": "needs the ratio",
    "--importance_sampling_level=none --clip_delta=4": "needs the ratio",
    "--gradient_accumulation_steps=3 --minibatch_size=6": "a multiple of it",
    "--masking=word --mask_ratio=0.3": "needs a masking other than word",
}

CONFIGS = {  # text of a file -> what is told
    "grup_size = 8": "did you mean 'group_size'",
    "group_size = '8 or so'": "group_size='8 or so' is not allowed",
    "group_size = 8.0": "group_size=8.0",
    "group_size = True": "group_size=True",
    "learning_rate = None": "learning_rate=None",
    "out_dir = None": "out_dir=None",
    "wandb_log = 1": "wandb_log=1",
    "half = 0.5": "there is no setting 'half'",
    "out_dir = 'a\\0b'": "out_dir='a\\x00b' is not allowed",
    "group_size == 8": "does not run: NameError",
    "group_size = ": "does not run: SyntaxError",
    "raise SystemExit(3)": "does not run: SystemExit: 3 (",
    "def f(): f()\nf()": "does not run: RecursionError",
    "group_size = 8\0": "does not run: SyntaxError",
}

PROMPTS = {  # content of a file -> what is told
    b"": " cannot be read (JSONDecodeError",
    b"{": " cannot be read (JSONDecodeError",
    b'{"prompts": ["a_"]} and more': " cannot be read (JSONDecodeError: Extra data",
    b"\xff\xfe{": " cannot be read (UnicodeDecodeError",
    b'\xef\xbb\xbf\xef\xbb\xbf{"prompts": ["a_"]}': " cannot be read (JSONDecodeError",
    10**5 * b"[": " cannot be read (RecursionError",
    b'{"prompts": [' + 6000 * b"9" + b"]}": " cannot be read (ValueError",
    b"[1]": " cannot be read (TypeError",
    b"3": " cannot be read (TypeError",
    b"null": " cannot be read (TypeError",
    b'"prompts"': " cannot be read (TypeError",
    b'{"prompt": ["a_"]}': " cannot be read (KeyError: 'prompts'); it must hold",
    b'{"prompts": []}': " holds no prompts; write",
    b'{"prompts": {}}': " holds no prompts",
    b'{"prompts": null}': " holds no prompts",
    b'{"prompts": "a_"}': " holds no prompts",
    b'{"prompts": ["abc"]}': ": prompt 0 is 'abc'; it takes up to 16 characters",
    b'{"prompts": ["a_", "A_"]}': ": prompt 1 is 'A_'",
    b'{"prompts": ["a_", 3]}': ": prompt 1 is 3;",
    b'{"prompts": ["a_", null]}': ": prompt 1 is None",
    b'{"prompts": [["a_"]]}': ": prompt 0 is ['a_']",
    b'{"prompts": [""]}': ": prompt 0 is ''",
    b'{"prompts": ["' + 17 * b"_" + b'"]}': ": prompt 0 is '_____",
    b'{"prompts": ["a_\\n"]}': r": prompt 0 is 'a_\n'",
    b'{"prompts": ["a_\\ud800"]}': r": prompt 0 is 'a_\ud800'",
    '{"prompts": ["ａ_"]}'.encode(): ": prompt 0 is 'ａ_'",
}

META, TRAIN, VAL = (
    b'{"vocabulary": " abcdefghijklmnopqrstuvwxyz_"}',
    bytes(range(27)) * 99,
    bytes(range(27)) * 99,
)
UNREADABLE, UNFIT = (
    " cannot be read (",
    "/train.bin is empty or does not fit its meta.json; make both again",
)
VOCABULARY = (
    " cannot be read (its vocabulary must be different ASCII characters, the last one '_'); "
    "make it with"
)
DATASETS = [  # meta.json, train.bin, val.bin (None: there is none) -> what is told
    (META, TRAIN, None, UNREADABLE),
    (META, None, VAL, UNREADABLE),
    (None, TRAIN, VAL, UNREADABLE),
    (META, b"", VAL, UNFIT),
    (META, TRAIN, b"", UNFIT.replace("train", "val")),
    (META, TRAIN + b"\x1b", VAL, UNFIT),
    (META, b"\xff" * 999, VAL, UNFIT),
    (META[:20], TRAIN, VAL, UNREADABLE),
    (b"[1]", TRAIN, VAL, UNREADABLE),
    (b"{}", TRAIN, VAL, UNREADABLE + "'vocabulary')"),
    (b"\xff" + META, TRAIN, VAL, UNREADABLE),
    (10**5 * b"[", TRAIN, VAL, UNREADABLE),
    (b'{"vocabulary": 3}', TRAIN, VAL, VOCABULARY),
    (b'{"vocabulary": ["a", "_"]}', TRAIN, VAL, VOCABULARY),
    (b'{"vocabulary": "abc"}', TRAIN, VAL, VOCABULARY),
    (b'{"vocabulary": "aa_"}', TRAIN, VAL, VOCABULARY),
    (b'{"vocabulary": "_"}', TRAIN, VAL, VOCABULARY),
    ('{"vocabulary": "é_"}'.encode(), TRAIN, VAL, VOCABULARY),
    (META, TRAIN[:15], VAL, " has 15 characters; block_size takes 5 to 15"),
    (META, TRAIN, VAL[:4], " has 4 characters; block_size takes"),
]

STATES = {  # what is wrong with the training state of a checkpoint -> what is told
    "shape": ": weight (0, 'exp_avg') has shape (3,), its architecture needs (28, 32)",
    "whole numbers": ": weight (0, 'exp_avg_sq') has shape Tensor",
    "no moments": "weight (0, 'exp_avg') has shape missing",
    "no tensors": "has no training state that fits (AttributeError); begin a new out_dir",
    "few numbers": "is damaged or no checkpoint",
    "no state": "has no training state that fits (KeyError)",
    "rng": "has no training state that fits (RuntimeError)",
    "no rng": "has no training state that fits (KeyError)",
    "inputs": "was not written by",
    "another text": "dataset/train.bin is not the file that the run in",
    "another judge": "judge_checkpoint is not the file that the run in",
    "processes": "is one of 2 processes, not 1; go on with torchrun --nproc_per_node=2",
    "iteration": "was not written by",
}

# (program, arguments) -> the value and the mend that its line names. {x} is a folder full of bad
# files, {w} a prepared text and two models, {r} a finished run.
OTHERS = [
    ("train_grpo.py", "{x}/nowhere.py", "nowhere.py does not exist; write --key=value"),
    ("train_grpo.py", "group_size=8", "group_size=8 does not exist; write --key=value"),
    ("train_grpo.py", "{x}", "does not exist"),
    *(("train_grpo.py", f"{{x}}/config{i}.py", told) for i, told in enumerate(CONFIGS.values())),
    (
        "train_grpo.py",
        "--generator_checkpoint={x}/none.pt",
        "generator_checkpoint={x}/none.pt does not exist; name a file that does",
    ),
    (
        "train_grpo.py",
        "--judge_checkpoint={x}/none.pt",
        "judge_checkpoint={x}/none.pt does not exist; name a file that does",
    ),
    ("train_grpo.py", "--judge_checkpoint={x}", "cannot be read: Is a directory; name a file"),
    (
        "train_grpo.py",
        "--reference_checkpoint={x}/none.pt",
        "reference_checkpoint={x}/none.pt does not exist; name a file that does",
    ),
    ("train_grpo.py", "--generator_checkpoint={x}/cut.pt", "cut.pt is damaged"),
    ("train_grpo.py", "--judge_checkpoint={x}/loop.pt", "loop.pt does not exist"),
    ("train_grpo.py", "--out_dir={x}/loop.pt", "loop.pt cannot be written"),
    ("train_grpo.py", "--judge_checkpoint={x}/flipped.pt", "flipped.pt is damaged"),
    ("train_grpo.py", "--judge_checkpoint={x}/empty", "empty is damaged"),
    ("train_grpo.py", "--judge_checkpoint={x}/notes.txt", "notes.txt is damaged or no checkpoint"),
    (
        "train_grpo.py",
        "--judge_checkpoint={x}/archive.zip",
        "archive.zip is damaged or no checkpoint",
    ),
    (
        "train_grpo.py",
        "--judge_checkpoint={x}/list.pt",
        "list.pt is no model file; python -m model.pretrain writes one",
    ),
    (
        "train_grpo.py",
        "--generator_checkpoint={w}/judge.pt",
        "judge.pt holds a 'judge', a generator is needed; are the two files swapped?",
    ),
    (
        "train_grpo.py",
        "--judge_checkpoint={w}/generator.pt",
        "generator.pt holds a 'generator', a judge is needed",
    ),
    (
        "train_grpo.py",
        "--reference_checkpoint={w}/judge.pt",
        "judge.pt holds a 'judge', a generator is needed",
    ),
    (
        "train_grpo.py",
        "--generator_checkpoint={x}/digits.pt",
        "has the vocabulary '0123456789_', ' abcdefghijklmnopqrstuvwxyz_' is needed; "
        "use a dataset and models made together",
    ),
    (
        "train_grpo.py",
        "--reference_checkpoint={x}/digits.pt",
        "use a dataset and models made together",
    ),
    ("train_grpo.py", "--generator_checkpoint={x}/future.pt", "'n_experts': 8"),
    (
        "train_grpo.py",
        "--generator_checkpoint={x}/wider.pt",
        "shape (27, 64), its architecture needs (27, 32)",
    ),
    (
        "train_grpo.py",
        "--generator_checkpoint={x}/short.pt",
        "block_size=16 is more than the 8 characters that the generator was made for; "
        "lower block_size",
    ),
    (
        "train_grpo.py",
        "--judge_checkpoint={x}/short_judge.pt",
        "the 8 characters that the judge was made for; lower block_size",
    ),
    ("train_grpo.py", "--block_size=17", "lower block_size"),
    ("train_grpo.py", "--block_size=1000000", "block_size=1000000: dataset"),
    ("train_grpo.py", "--dataset={x}/none", "none cannot be read"),
    ("train_grpo.py", "--dataset={x}/ascii", "use a dataset and models made together"),
    *(
        ("train_grpo.py", f"--dataset={{x}}/data{i}", f"{{x}}/data{i}{told}")
        for i, told in enumerate(told for *_, told in DATASETS)
    ),
    *(
        (
            "train_grpo.py",
            f"--prompts_file={{x}}/prompts{i}",
            f"prompts_file={{x}}/prompts{i}{told}",
        )
        for i, told in enumerate(PROMPTS.values())
    ),
    (
        "train_grpo.py",
        "--prompts_file={x}/none.json",
        "prompts_file={x}/none.json does not exist; name a file that does",
    ),
    ("train_grpo.py", "--prompts_file={x}", "cannot be read"),
    *(
        ("train_grpo.py", f"--reward={{x}}/rewards.py:{name}", told)
        for name, told in (
            ("wrong_shape", "reward wrong_shape returned the shape (2, 16)"),
            ("not_finite", "6 values that are not finite; it must return finite numbers"),
            ("broken", "reward broken failed: NameError"),
            ("none", "has no function 'none'; write def none("),
            ("number", "has no function 'number'"),
            ("text", "reward text failed"),
            ("silent", "reward silent failed"),
        )
    ),
    ("train_grpo.py", "--reward={x}/none.py:f", "none.py does not run: FileNotFoundError"),
    ("train_grpo.py", "--reward={x}/config10.py:f", "config10.py does not run: SyntaxError"),
    ("train_grpo.py", "--out_dir={x}/notes.txt", "notes.txt cannot be written"),
    ("train_grpo.py", "--out_dir={x}/notes.txt/out", "notes.txt/out cannot be written"),
    ("train_grpo.py", "--out_dir=/dev/null", "/dev/null cannot be written"),
    ("train_grpo.py", "--out_dir=" + 300 * "x", "xxx"),
    ("train_grpo.py", "--out_dir={x}/blocked", "blocked cannot be written"),
    (
        "train_grpo.py",
        "--out_dir={r} --generator_checkpoint={r}/checkpoint.pt",
        "would be overwritten by this run, and is its reference; name another out_dir",
    ),
    (
        "train_grpo.py",
        "--out_dir={x}/fresh --init_from=resume",
        "fresh/checkpoint.pt, and there is none; leave init_from out to begin",
    ),
    (
        "train_grpo.py",
        "--out_dir={r} --init_from=resume --max_iters=2",
        "is at step 2 already; give a larger max_iters",
    ),
    (
        "train_grpo.py",
        "--out_dir={r} --init_from=resume --max_iters=9",
        "the learning rate is 0 from step 2 on; begin a new out_dir from there",
    ),
    (
        "train_grpo.py",
        "--out_dir={r} --init_from=resume --max_iters=9 --kl_beta=0.5",
        "the run in {r} goes on only as it began, not with kl_beta=0.5 (it was 0.1); leave that",
    ),
    (
        "train_grpo.py",
        "--out_dir={r} --init_from=resume --max_iters=9 --seed=2",
        "not with seed=2 (it was 1)",
    ),
    *(
        (
            "train_grpo.py",
            f"--out_dir={{x}}/run{i} --init_from=resume --max_iters=9 --lr_decay_iters=2 "
            "--min_lr=1e-5",
            told,
        )
        for i, told in enumerate(
            (
                "was not written by train_grpo.py; name the out_dir of a run",
                "was not written by",
                "was not written by",
                "is no model file",
                "is damaged",
                *STATES.values(),
            )
        )
    ),
    (
        "data/char_diffusion/prepare.py",
        "--input={x}/none.txt --out_dir={x}/d",
        "none.txt cannot be read, or is not UTF-8 text",
    ),
    (
        "data/char_diffusion/prepare.py",
        "--input={x} --out_dir={x}/d",
        "cannot be read, or is not UTF-8 text",
    ),
    (
        "data/char_diffusion/prepare.py",
        "--input={x}/empty --out_dir={x}/d",
        "empty leaves 0 characters for train.bin, at least 1000 are needed; give a longer text",
    ),
    ("data/char_diffusion/prepare.py", "--input={x}/notes.txt --out_dir={x}/d", "notes.txt leaves"),
    (
        "data/char_diffusion/prepare.py",
        "--input={x}/digits.txt --out_dir={x}/d",
        "digits.txt leaves 0 characters",
    ),
    (
        "data/char_diffusion/prepare.py",
        "--input={x}/binary --out_dir={x}/d",
        "binary cannot be read, or is not UTF-8 text",
    ),
    ("data/char_diffusion/prepare.py", "--input={w}/text.txt --out_dir={x}/notes.txt", "notes.txt"),
    ("data/char_diffusion/prepare.py", "--alphabet=greek", "'greek' (choose from"),
    ("data/char_diffusion/prepare.py", "--outdir={x}/d", "--outdir="),
    ("data/char_diffusion/prepare.py", "my.txt", "my.txt"),
    ("-m grpo.evaluate", "", "out_dir"),
    ("-m grpo.evaluate", "{x}", "checkpoint.pt cannot be read: No such file"),
    ("-m grpo.evaluate", "{r} {r}", "{r}"),
    ("-m grpo.evaluate", "{r} --k=3", "--k=3"),
    *(
        ("-m grpo.evaluate", f"{{x}}/run{i}", told)
        for i, told in enumerate(
            (
                "checkpoint.pt was not written by train_grpo.py",
                "checkpoint.pt was not",
                "checkpoint.pt was not",
                "checkpoint.pt is no model file",
                "checkpoint.pt is damaged",
            )
        )
    ),
    *(
        ("-m grpo.evaluate", f"{{x}}/run{i}", told)
        for i, told in enumerate(
            (
                "none cannot be read",
                "none.pt cannot be read",
                "there is no setting 'experts'",
                "kl_beta=-1.0 is not allowed",
            ),
            start=5 + len(STATES),
        )
    ),
    *(
        ("-m grpo.fill", f"--before={{w}}/generator.pt --judge={{w}}/judge.pt {arguments}", told)
        for arguments, told in (
            ("''", "text '' has 0 characters; it takes 1 to 16"),
            ("'the c_t sat on it'", "has 17 characters; it takes 1 to 16"),
            ("c_t --checkpoint=no/such.pt", "no/such.pt cannot be read"),
            ("c_t --before=no/such.pt", "no/such.pt cannot be read"),
            ("c_t --k=0", "k=0 is not allowed; k (draws) takes a whole number from 1"),
            ("c_t --k=many", "'many'"),
            ("c_t --temperature=0", "temperature=0.0"),
            ("c_t --temperature=hot", "temperature='hot'"),
            ("c_t --seed=-1", "seed=-1"),
            ("", "there is no text; it takes one or more"),
            ("c_t --top_p=1", "--top_p=1"),
        )
    ),
    (
        "-m grpo.fill",
        "c_t --before={w}/judge.pt --judge={w}/generator.pt",
        "are the two files swapped?",
    ),
    (
        "-m grpo.fill",
        "c_t --before={x}/notes.txt --judge={w}/judge.pt",
        "notes.txt is damaged or no checkpoint",
    ),
    ("-m grpo.fill", "c_t --before={x}/list.pt --judge={w}/judge.pt", "list.pt is no model file"),
    (
        "-m grpo.fill",
        "c_t --before={w}/generator.pt --judge={w}/judge.pt --checkpoint={x}/digits.pt",
        "digits.pt has the vocabulary",
    ),
    *(
        ("-m grpo.compare", arguments, told)
        for arguments, told in (
            ("", "out_dir"),
            ("{r} {x}", "holds no run"),
            ("{r} --plot", "--plot"),
        )
    ),
    *(
        ("-m grpo.bench", f"--device=cpu {arguments}", told)
        for arguments, told in (
            ("--G=3", "3 (choose from"),
            ("--rounds=0", "--rounds=0"),
            ("--rounds=few", "'few'"),
            ("--device=tpu", "device='tpu' is not on this machine"),
            ("--only all", "'all' (choose from"),
            ("--V=10", "10 (choose from"),
            ("--dtype=float8", "'float8' (choose from"),
            ("--only models", "'models' (choose from"),
            ("--json=/dev/null/x.json", "/dev/null"),
            ("fast", "fast"),
        )
    ),
    *(
        ("-m model.pretrain", f"--dataset={{w}}/text --block_size=16 {arguments}", told)
        for arguments, told in (
            ("--n_layer=0", "1 or more"),
            ("--judge_layers=7", "--n_layer=6"),
            ("--device=tpu", "auto or one of: cpu"),
            ("--n_embd=100", "a multiple of 32"),
            ("--batch_size=1", "2 or more"),
            ("--generator_steps=0", "1 or more"),
            ("--seed=-1", "0 or more"),
            ("--seed=x", "'x'"),
            ("--dtype=float8", "'float8' (choose from"),
            ("--block_size=3", "block_size=3"),
            ("--block_size=9999999", "block_size=9999999"),
            ("--dataset={x}/none", "none cannot be read"),
            ("--steps=3", "--steps=3"),
            ("--resume --out_dir={x}/fresh", "fresh/generator_state.pt, and there is none"),
            ("--out_dir={x}/notes.txt", "notes.txt"),
            ("--resume --out_dir={x}/pretraining", "generator_state.pt"),
        )
    ),
]

REWARDS = """
import torch
number = 3

def wrong_shape(completions, masked, mask, decode):
    return completions[:, 0]

def not_finite(completions, masked, mask, decode):
    return torch.full(completions.shape[:2], float("nan"))

def broken(completions, masked, mask, decode):
    return nowhere

def text(completions, masked, mask, decode):
    return "good"

def silent(completions, masked, mask, decode):
    pass
"""


def datasets(x):
    for i, (*contents, _) in enumerate(DATASETS):
        (x / f"data{i}").mkdir()
        for name, content in zip(("meta.json", "train.bin", "val.bin"), contents):
            if content is not None:
                (x / f"data{i}" / name).write_bytes(content)


def checkpoints(x, w, vocabulary):
    whole = (w / "judge.pt").read_bytes()
    (x / "cut.pt").write_bytes(whole[: len(whole) // 2])
    middle = len(whole) // 2
    (x / "flipped.pt").write_bytes(
        whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    )
    write(x / "list.pt", [1, 2])
    (x / "loop.pt").symlink_to(x / "loop.pt")
    shape = TransformerConfig(len(vocabulary), 16, 2, 2, 32)
    write(
        x / "digits.pt", model_file(Generator(TransformerConfig(11, 16, 1, 1, 32)), "0123456789_")
    )
    for name, changes in (("future.pt", {"n_experts": 8}), ("wider.pt", {})):
        content = model_file(Generator(shape), vocabulary)
        content["architecture"] |= changes
        if name == "wider.pt":
            content["weights"]["head.weight"] = torch.zeros(27, 64)
        write(x / name, content)
    short = TransformerConfig(len(vocabulary), 8, 1, 1, 32)
    write(x / "short.pt", model_file(Generator(short), vocabulary))
    write(x / "short_judge.pt", model_file(Judge(short), vocabulary))


def spoilt(training, name):
    """A training state, wrong in one way: see STATES."""
    training = copy.deepcopy(training)
    moments = training["optimizer"]["state"]
    if name == "shape":
        moments[0]["exp_avg"] = torch.zeros(3)
    elif name == "whole numbers":
        moments[0]["exp_avg_sq"] = moments[0]["exp_avg_sq"].long()
    elif name == "no moments":
        moments.clear()
    elif name == "no tensors":
        moments[0] = 3
    elif name == "few numbers":
        moments[0]["exp_avg"] = torch.zeros(1).expand(moments[0]["exp_avg"].shape)
    elif name == "no state":
        training["optimizer"] = {}
    elif name == "rng":
        training["rng"] = {"cpu": torch.zeros(9, dtype=torch.uint8), "cuda": []}
    elif name == "no rng":
        training["rng"] = {}
    elif name == "inputs":
        training["inputs"] = 3
    elif name == "another text":
        training["inputs"] = training["inputs"] | {"dataset/train.bin": "0" * 64}
    elif name == "another judge":
        training["inputs"] = training["inputs"] | {"judge_checkpoint": "0" * 64}
    elif name == "processes":
        training["processes"] = 2
    elif name == "iteration":
        training["iteration"] = -1
    return training


def runs(x, r):
    """Folders of runs that cannot be gone on from, nor evaluated."""
    content = read(r / "checkpoint.pt")
    training = content["training"]
    training["config"] |= {"min_lr": 1e-5}
    for i, each in enumerate(
        [
            content | {"training": 3},
            content | {"training": {}},
            content | {"training": training | {"config": 3}},
            {"training": training},
            None,
            *(content | {"training": spoilt(training, name)} for name in STATES),
            *(
                content | {"training": training | {"config": training["config"] | change}}
                for change in (
                    {"dataset": str(x / "none")},
                    {"judge_checkpoint": str(x / "none.pt")},
                    {"experts": 8},
                    {"kl_beta": -1.0},
                )
            ),
        ]
    ):
        (x / f"run{i}").mkdir()
        if each:
            write(x / f"run{i}" / "checkpoint.pt", each)
        else:
            shutil.copy(x / "cut.pt", x / f"run{i}" / "checkpoint.pt")


@pytest.fixture(scope="module")
def places(world, tmp_path_factory):
    """{x}, {w}, {r} of the table, and the flags of a training run."""
    x = tmp_path_factory.mktemp("mistakes")
    base = PLAIN | {
        "dataset": world / "text",
        "masking": "word",
        "generator_checkpoint": world / "generator.pt",
        "judge_checkpoint": world / "judge.pt",
        "out_dir": x / "out",
        "block_size": 16,
        "batch_size": 4,
        "group_size": 4,
        "max_iters": 4,
        "learning_rate": 1e-2,
        "eval_inputs": 2,
        "device": "cpu",
    }
    train_grpo.main(command_line(base, out_dir=x / "run", max_iters=2))
    for i, text in enumerate(CONFIGS):
        (x / f"config{i}.py").write_text(text)
    for i, content in enumerate(PROMPTS):
        (x / f"prompts{i}").write_bytes(content)
    (x / "rewards.py").write_text(REWARDS)
    (x / "notes.txt").write_text("a few words only, and a file in the way of folders")
    (x / "digits.txt").write_text(9999 * "1234 5678\n")
    (x / "empty").write_bytes(b"")
    (x / "binary").write_bytes(bytes(range(256)) * 50)
    shutil.make_archive(str(x / "archive"), "zip", world / "text")
    (x / "blocked" / "config.json").mkdir(parents=True)
    (x / "fresh").mkdir()
    vocabulary = read(world / "generator.pt")["vocabulary"]
    datasets(x)
    prepare.prepare(x / "ascii", world / "text.txt", "ascii")
    checkpoints(x, world, vocabulary)
    runs(x, x / "run")
    write(x / "pretraining" / "generator_state.pt", {"weights": {}})
    return {"x": str(x), "w": str(world), "r": str(x / "run")}, base


def listing(*folders):
    return {
        path: path.is_file() and (path.stat().st_mtime_ns, path.stat().st_size)
        for folder in folders
        for path in sorted(Path(folder).rglob("*"))
    }


def arguments_of(places, program, arguments):
    names, base = places
    return (command_line(base) if program == "train_grpo.py" else []) + [
        argument.format(**names) for argument in shlex.split(arguments)
    ]


def check(code, out, err, message, names):
    """Exit code 2, one line that says what is expected, and how to mend it, and nothing else."""
    for name, folder in names.items():
        message = message.replace(f"{{{name}}}", folder)
    assert (
        code == 2
        and out == ""
        and err.count("\n") == 1
        and err.endswith("\n")
        and "Traceback" not in err
    ), (out, err)
    assert message in err and re.search("; | takes | needs |allowed: |choose from", err), (
        message,
        err,
    )


@pytest.mark.parametrize(
    "program, arguments, message",
    [*(("train_grpo.py", arguments, message) for arguments, message in SETTINGS.items()), *OTHERS],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    places, tmp_path, monkeypatch, capsys, program, arguments, message
):
    given, before = arguments_of(places, program, arguments), listing(*places[0].values())
    if program != "-m grpo.bench":  # it reads config/ and the models that ship
        monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        PROGRAMS[program](given)
    shown = capsys.readouterr()
    check(stopped.value.code, *shown, message, places[0])
    if arguments in SETTINGS:
        name, _, value = arguments.split()[-1].lstrip("-").partition("=")
        assert name in shown.err and (value in shown.err or str(float(value)) in shown.err)
    assert listing(*places[0].values()) == before and not list(tmp_path.iterdir())


def test_as_real_commands(places):
    """One of each program's, at the same time."""
    chosen = [
        case
        for case in OTHERS
        if (case[0], case[1])
        in (
            ("train_grpo.py", "--judge_checkpoint={x}/flipped.pt"),
            ("data/char_diffusion/prepare.py", "--input={x}/binary --out_dir={x}/d"),
            ("-m grpo.evaluate", "{r} --k=3"),
            ("-m grpo.fill", "c_t --before={w}/judge.pt --judge={w}/generator.pt"),
            ("-m model.pretrain", "--dataset={w}/text --block_size=16 --n_embd=100"),
        )
    ]
    before = listing(*places[0].values())
    running = [
        subprocess.Popen(
            [sys.executable, *program.split(), *arguments_of(places, program, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for program, arguments, _ in chosen
    ]
    for process, (_, _, message) in zip(running, chosen, strict=True):
        out, err = process.communicate()
        check(process.returncode, out, err, message, places[0])
    assert len(running) == 5 and listing(*places[0].values()) == before


def test_several_lines_become_one(capsys):
    with pytest.raises(SystemExit):
        train_grpo.main(["--out\ndir=x"])
    told = capsys.readouterr().err
    assert told.startswith("train_grpo.py: --out\\ndir=x: there is no setting 'out\\ndir'; did you")
    assert told.count("\n") == 1
