"""Teach a small language model to split numbers with GRPO (2402.03300), in one file.

    python -m grpo.tokens    # in the project's folder, a minute on one core

After a prompt such as `88=` the model writes any sum that holds: `41+47.` or `6+70+12.` (the dot
ends it). Cross-entropy on random sums gets it to a third. Then GRPO has it complete each prompt G
times, and makes the characters of correct completions more likely, and those of wrong ones less.
Put it next to grpo/one_file.py. What's new: a character sees those before it, so drawing takes a
pass a token (`generate`), and scoring only one (`log_probs`). Completions end where they like, so
there's padding (`completion_mask`), and there are several ways to average (`token_loss`).

Shapes: B prompts, G completions of each, N = B·G texts, L tokens of a text, of which the first P
are the prompt, and V characters of the vocabulary.
"""

import copy
import math
import re

import numpy as np
import torch
import torch.nn as nn

from model.transformer import TransformerConfig, Trunk

VOCABULARY = "0123456789+=."  # a token is an index into these
END = VOCABULARY.index(".")  # the end of text, which also fills up the rest of a row
B, G, L, P = 16, 16, 12, 3
PRETRAINING, STEPS, WARMUP = 600, 80, 5  # updates by cross-entropy, GRPO's steps, its warmup
UPDATES = 2  # each group of completions is used twice
LEARNING_RATE = 1e-3
CLIP = 0.2  # the ratio is clipped to 1 ± CLIP
BETA = 0.02  # the weight of the KL

CHOOSING = np.array([12, 21, 30, 49, 58, 67, 76, 85, 94])  # held out, to choose settings with
HELD_OUT = np.array([17, 26, 35, 44, 53, 62, 71, 80, 99])  # held out, to report on
TRAINING = np.setdiff1d(np.arange(10, 100), [*CHOOSING, *HELD_OUT])


class Causal(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.trunk = Trunk(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, tokens):
        """Map tokens (N,L) to logits of the next ones (N,L,V)."""
        L = tokens.shape[1]
        earlier = torch.ones(L, L, dtype=torch.bool).tril()  # this hides padding, too
        return self.head(self.trunk(tokens, earlier))


def encode(texts):
    return torch.tensor([[VOCABULARY.index(c) for c in text] for text in texts])


def decode(tokens):
    return ["".join(VOCABULARY[i] for i in row) for row in tokens.tolist()]


def is_correct(text):
    """Tell whether a text such as 88=41+47. holds. One that was cut off has no end, and doesn't."""
    match = re.fullmatch(r"(\d+)=([1-9]\d*(\+[1-9]\d*)+)\.+", text)
    return bool(match) and sum(map(int, match[2].split("+"))) == int(match[1])


def reward(tokens):
    return torch.tensor([float(is_correct(text)) for text in decode(tokens)])  # (N,)


def log_probs(model, tokens):
    """Compute the log-probability of each token after the first: (N,L) -> (N,L-1).

    The logits at t are about token t + 1, hence the shift. Summed over a completion y, that's
    log q(y) = Σ_t log q(y_t | y_<t). (A temperature would divide the logits, here and below.)
    """
    logits = model(tokens)[:, :-1].double()  # (N,L-1,V); double, as in one_file.py
    return logits.log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def generate(model, tokens, uniforms):
    """Complete prompts of equal length, a pass a token: (N,P), (N,L-P) -> (N,L)."""
    for uniform in uniforms.T:  # (N,); each pass reads everything anew, for want of a KV cache
        ends = model(tokens)[:, -1].double().softmax(dim=-1).cumsum(dim=-1)  # (N,V)
        drawn = (ends <= uniform[:, None]).sum(dim=-1)  # (N,) as one_file.py does it
        drawn = torch.where((tokens == END).any(dim=1), END, drawn)  # after the end: padding
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
    return tokens


def completion_mask(tokens):
    """Tell which tokens were drawn, in the columns of log_probs: (N,L) -> (N,L-1) bool."""
    ended = (tokens == END).cumsum(dim=1) > 0  # (N,L) from the end on
    # What counts has no end before it. (With tokens != END, nothing would teach the model to stop.)
    return ~ended[:, :-1] & (torch.arange(1, tokens.shape[1]) >= P)


def advantages(rewards):
    """Compare each completion with the mean of its group, in deviations: (B,G) -> (B,G)."""
    deviation = rewards.std(dim=1, correction=0, keepdim=True)  # (B,1)
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (deviation + 1e-4)


def token_loss(now, old, ref, A, mask, beta=BETA, clip=CLIP, average="completion"):
    """Average -min(ρA, clip(ρ)A) + β·k3 over the tokens of completions: -> a scalar.

    `now`, `old` and `ref` (N,L-1) are log_probs of the model now, of the one that drew the
    completions, and of the frozen base model. All tokens of a completion share its advantage, A
    (N,1). With r = q_ref/q, k3 is r - 1 - log r: never negative, and on average the KL. Either
    average each completion first, as GRPO was published, so that a token of a long one counts less,
    or all tokens at once (DAPO, 2503.14476), or divide by a constant (Dr. GRPO, 2503.20783).
    """
    ratio = (now - old).exp()  # (N,L-1)
    objective = torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)  # (N,L-1)
    log_r = ref - now  # (N,L-1)
    k3 = log_r.exp() - 1 - log_r  # (N,L-1)
    loss = (beta * k3 - objective) * mask  # (N,L-1)
    if average == "completion":
        return (loss.sum(dim=1) / mask.sum(dim=1)).mean()
    return loss.sum() / (mask.sum() if average == "token" else mask.numel())


def update(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def pretrain(seed=1):
    """Make a model, and teach it random sums of two or three terms by cross-entropy."""
    torch.manual_seed(seed)
    model = Causal(TransformerConfig(len(VOCABULARY), L, n_layer=2, n_head=4, n_embd=64))
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    muon = torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    for step in range(PRETRAINING):
        muon.param_groups[0]["lr"] = 0.02 * min((step + 1) / 40, 1 - step / PRETRAINING)
        rng = np.random.default_rng((seed, step))
        number = rng.choice(TRAINING, 128)  # (128,)
        low, high = np.sort(rng.integers(1, number, (2, 128)), axis=0)  # two places to cut it
        high = np.where(rng.random(128) < 0.5, low, high)  # half of the time, only one
        terms = zip(number, low, high - low, number - high)
        texts = [f"{n}={a}+{b}+{c}".replace("+0+", "+") for n, a, b, c in terms]
        tokens = encode([text.ljust(L, ".") for text in texts])  # (128,L)
        update(model, muon, -log_probs(model, tokens)[completion_mask(tokens)].mean())
    return model


def draw_batch(numbers, seed):
    """Repeat each number's prompt G times: -> prompts (N,P), random numbers (N,L-P)."""
    prompts = encode([f"{number}=" for number in numbers for _ in range(G)])  # (N,P)
    uniforms = np.random.default_rng(seed).random((len(prompts), L - P), dtype=np.float32)
    return prompts, torch.from_numpy(uniforms)


def grpo_step(policy, reference, adamw, prompts, uniforms, advantages=advantages, **settings):
    """Complete the prompts, compare what came out, and update the policy."""
    tokens = generate(policy, prompts, uniforms)  # (N,L)
    mask = completion_mask(tokens)  # (N,L-1)
    A = advantages(reward(tokens).view(-1, G)).view(-1, 1)  # (N,1)
    with torch.no_grad():
        old, ref = log_probs(policy, tokens), log_probs(reference, tokens)  # each (N,L-1)
    for _ in range(UPDATES):
        now = log_probs(policy, tokens)  # (N,L-1), at first the same as `old`
        update(policy, adamw, token_loss(now, old, ref, A, mask, **settings))


def train(policy, reference, seed=1, size=B, rate=LEARNING_RATE, **settings):
    """Take all steps, yielding before each how many are done. Settings go to grpo_step."""
    adamw = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), weight_decay=0)
    for step in range(STEPS):
        yield step
        cosine = (1 + math.cos(math.pi * max(0, step - WARMUP) / (STEPS - WARMUP))) / 2  # 1 to 0
        adamw.param_groups[0]["lr"] = rate * min((step + 1) / (WARMUP + 1), cosine)
        numbers = np.random.default_rng((seed, step, 0)).choice(TRAINING, size)  # (B,)
        grpo_step(policy, reference, adamw, *draw_batch(numbers, (seed, step, 1)), **settings)
    yield STEPS


@torch.no_grad()
def evaluate(policy, numbers):
    """Complete numbers: -> texts, the share of correct ones, mean length, entropy."""
    tokens = generate(policy, *draw_batch(numbers, 2**31))  # (N,L)
    mask = completion_mask(tokens)  # (N,L-1)
    surprise = -(log_probs(policy, tokens) * mask).sum(dim=1)  # (N,), whose mean is the entropy
    figures = reward(tokens), mask.sum(dim=1).double(), surprise  # each (N,)
    return decode(tokens), *(values.mean().item() for values in figures)


if __name__ == "__main__":
    torch.set_num_threads(1)  # for a network this small, more would wait for each other
    reference = pretrain()
    policy = copy.deepcopy(reference)
    for step in train(policy, reference):
        if step % 20 == 0:
            texts, *figures = evaluate(policy, HELD_OUT.repeat(4))  # 4·G completions of each
            print("step {}: correct {:.3f}, length {:.1f}, entropy {:.1f}".format(step, *figures))
            print("   ", *texts[:: 4 * G])
