"""Teach a model to fill blanks with GRPO (2402.03300): the default experiment, in one file.

    python -m grpo.one_file    # in the project's folder, once train_grpo.py has made data/text

The generator, a small transformer, fills all blanks of `the ___ sat on a ____ mat` in one step. No
blank sees what the others get, so the letters of a word often clash. The judge, a second one, has
learned to tell real words from such fills. We want fills that it takes for real, but no gradient
leads from it back through the draw of a letter. GRPO needs none. It fills each input G times, and
makes the letters of a fill likelier if the judge likes it better than the other fills of the same
word, and rarer if it does not. The losses are those of train_grpo.py's defaults, as a test shows.

Shapes: B inputs, T characters of each, G completions of each input, V letters.
"""

import math
import os
import re

import numpy as np
import torch

from model.transformer import Generator, Judge, TransformerConfig

LETTERS = np.array(list(" abcdefghijklmnopqrstuvwxyz_"))  # a token is an index into these
BLANK = 27
B, G, T = 40, 16, 64
STEPS, WARMUP, UPDATES = 30, 5, 2  # all steps, those that warm up, and the updates in each step
LEARNING_RATE, CLIP, BETA = 1e-3, 0.2, 0.65


def load(kind, name):
    saved = torch.load(f"model/pretrained/{name}.pt", weights_only=True)
    model = kind(TransformerConfig(**saved["architecture"]))
    model.load_state_dict(saved["weights"])
    return model


def draw_inputs(text, size, seed):
    """Draw windows of the text, and hide up to three words of 2 to 4 letters in each.

    `words` (B,T) is 1, 2 and 3 at the letters of the hidden words, and 0 in the visible text.
    `uniforms` (B,G,T) holds a random number from 0 to 1 for every letter that will be drawn.
    """
    rng = np.random.default_rng((*seed, 0))
    starts = rng.integers(len(text) - T + 1, size=size)  # (B,)
    tokens = text[starts[:, None] + np.arange(T)].astype(int)  # (B,T)
    words = np.zeros((size, T), dtype=int)  # (B,T)
    rng.random(size)  # train_grpo.py draws these, too, to choose a way of hiding for each input
    for i, window in enumerate(tokens):
        short = re.finditer("(?<= )[a-z]{2,4}(?= )", "".join(LETTERS[window]))
        for n, (start, end) in enumerate(rng.permutation([word.span() for word in short])[:3], 1):
            words[i, start:end] = n
    empty = np.flatnonzero(~words.any(axis=1))  # a window without short words gets a single blank
    words[empty, rng.integers(T, size=len(empty))] = 1
    uniforms = np.random.default_rng((*seed, 1)).random((size, G, T), dtype=np.float32)
    tokens, words, uniforms = map(torch.from_numpy, (tokens, words, uniforms))
    return tokens, tokens.masked_fill(words > 0, BLANK), words, uniforms


def log_probs(generator, masked):
    """Compute the log-probability of each letter at each position: (B,T) -> (B,T,V)."""
    (logits,) = generator(masked, None)  # (B,T,V+1); the networks have no dropout
    return logits[..., :BLANK].double().log_softmax(dim=-1)  # double, so that they add up to 1


def sample(log_q, masked, uniforms):
    """Fill each blank G times: (B,T,V), (B,T), (B,G,T) -> completions (B,G,T)."""
    # Each letter owns a piece of [0,1) as long as its probability. Which piece was hit?
    ends = log_q.exp().cumsum(dim=-1)[:, None]  # (B,1,T,V) where the pieces end
    letters = (ends <= uniforms[..., None]).sum(dim=-1)  # (B,G,T)
    return torch.where(masked[:, None] == BLANK, letters, masked[:, None])


@torch.no_grad()
def judge_words(judge, completions, words):
    """Reward each letter with the judge's mean logit that its word is real: (B,G,T) -> (B,G,T)."""
    logits = torch.cat([judge(part) for part in completions.flatten(0, 1).split(32)])  # (B·G,T)
    same_word = (words[:, None] == words[..., None]).float()  # (B,T,T) the loss skips word 0
    mean = logits.view(completions.shape) @ same_word / same_word.sum(dim=1, keepdim=True)
    return mean.clamp(-8, 8)  # (B,G,T) no single word shall outweigh all others


def grpo_loss(log_q, log_q_old, log_q_ref, completions, A, mask):
    """Average -min(ρA, clip(ρ)A) + β·KL(q‖q_ref) over the blanks: -> a scalar.

    A is a letter's advantage (B,G,T). ρ = q/q_old tells how much likelier the letter has become
    since it was drawn. At first ρ is 1, and the gradient of ρA is A ∇log q. Averaged over draws,
    this is the gradient of the expected reward, because ∇q = q ∇log q. Once ρ has passed 1.2 with
    A > 0, or 0.8 with A < 0, the minimum is constant, and the letter is pushed no further. The KL
    divergence holds q near q_ref, the generator before training, whose fills the judge knows.
    """
    ratio = (log_q - log_q_old).gather(-1, completions.mT).exp().mT  # (B,G,T)
    objective = torch.minimum(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A).mean(dim=1)  # (B,T)
    kl = (log_q.exp() * (log_q - log_q_ref)).sum(dim=-1)  # (B,T)
    loss = (BETA * kl - objective) * mask  # (B,T)
    return (loss.sum(dim=1) / mask.sum(dim=1)).mean()


def train(generator, reference, judge, text):
    """Take all steps, and yield their losses: about β·KL, because advantages average 0."""
    adamw = torch.optim.AdamW(generator.parameters(), betas=(0.9, 0.99), weight_decay=0)
    for step in range(STEPS):
        cosine = (1 + math.cos(math.pi * max(0, step - WARMUP) / (STEPS - WARMUP))) / 2  # 1 to 0
        adamw.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / (WARMUP + 1), cosine)
        _, masked, words, uniforms = draw_inputs(text, B, (1, step))  # seed 1
        with torch.no_grad():  # one forward pass serves all G completions
            log_q_old, log_q_ref = log_probs(generator, masked), log_probs(reference, masked)
        completions = sample(log_q_old, masked, uniforms)  # (B,G,T)
        reward = judge_words(judge, completions, words)  # (B,G,T)
        # Some words are easy. So subtract the mean of the other fills, which this one cannot alter.
        advantages = reward - (reward.sum(dim=1, keepdim=True) - reward) / (G - 1)  # (B,G,T)
        total = 0
        for _ in range(UPDATES):  # judging is slow, so each fill serves two updates
            log_q = log_probs(generator, masked)  # (B,T,V)
            loss = grpo_loss(log_q, log_q_old, log_q_ref, completions, advantages, words > 0)
            adamw.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(generator.parameters(), 1.0)
            adamw.step()
            total += loss.item()
        yield total / UPDATES


@torch.no_grad()
def evaluate(generator, masked, words, uniforms, lexicon):
    """Fill inputs: -> the first completion of each (B,T), the share of fills that are words."""
    completions = sample(log_probs(generator, masked), masked, uniforms)  # (B,G,T)
    valid = []
    for row, word in zip(completions, words):  # (G,T), (T,)
        for n in word.unique()[1:]:
            valid += ["".join(fill) in lexicon for fill in LETTERS[row[:, word == n]]]
    return completions[:, 0], sum(valid) / len(valid)


if __name__ == "__main__":
    if not os.path.exists("data/text/val.bin"):
        raise SystemExit("data/text/val.bin is missing; make it: python -m data.text.prepare")
    text, val = [np.fromfile(f"data/text/{part}.bin", dtype=np.uint8) for part in ("train", "val")]
    lexicon = set("".join(LETTERS[text]).split())
    tokens, masked, words, uniforms = draw_inputs(val, 256, (2**31,))
    generator, reference = load(Generator, "generator"), load(Generator, "generator")
    before, share = evaluate(reference, masked, words, uniforms, lexicon)
    print(f"step 0: valid words on held-out text {share:.3f}")
    for step, loss in enumerate(train(generator, reference, load(Judge, "judge"), text), 1):
        if step % 5 == 0:
            now, share = evaluate(generator, masked, words, uniforms, lexicon)
            print(f"step {step}: loss {loss:.3f}, valid words on held-out text {share:.3f}")
    for i in (words > 0).sum(dim=1).topk(3).indices:  # the inputs with the most blanks
        for name, rows in {"text": tokens, "input": masked, "before": before, "now": now}.items():
            print(f"{name:7s}", "".join(LETTERS[rows[i]]))
