"""Teach a small language model to split numbers with GRPO (2402.03300), in one file.

    python -m grpo.tokens    # in the project's folder, a minute on one core

After a prompt such as `88=` the model writes any sum that holds: `41+47.` or `6+70+12.` (the dot
ends it). Cross-entropy gets it to a third. GRPO makes correct completions more likely, and ends at
.7 to .8, on sums that are easy: `2+24`, `2+60`. Put it next to grpo/one_file.py. What's new:
drawing takes a pass a token, scoring one for all (`generate`, `log_probs`). Completions end where
they like, so there's padding (`completion_mask`), and more than one average (`token_loss`). The KL
is estimated, the advantage divided by the group's deviation, and the reward is the rule.

Shapes: B prompts, G completions of each, N = B·G texts, L tokens of a text, of which the first P
are the prompt, and V characters of the vocabulary.

Nobody has trained a large model with this. There, you'd also change:

    sampling   An engine draws, and its log-probs aren't quite the trainer's. Take `old` from the
               trainer, and multiply the objective by min(exp(old - engine's), 2), detached
               (fengyao.notion.site/off-policy-rl). Turn off top-k (in Hugging Face it's 50), top-p
               and penalties
    lengths    mask out what was cut off (DAPO, 2503.14476)
    settings   a rate of 1e-6, G = 64 and BETA = .04 (DeepSeekMath, 2402.03300), or G = 16 with
               DAPO's clip and no KL

For one pass of a diffusion model, log_probs has no shift, and the completion mask is the blanks.
"""

import copy
import math
import re

import numpy as np
import torch
from torch import nn

from model.transformer import TransformerConfig, Trunk

VOCABULARY = "0123456789+=."  # a token is an index into these
END = VOCABULARY.index(".")  # the end of text, which also fills up the rest of a row
B, G, L, P = 16, 16, 12, 3
PRETRAINING, STEPS, WARMUP = 600, 80, 5  # updates by cross-entropy, GRPO's steps, its warmup
LEARNING_RATE, UPDATES = 1e-3, 2  # each group of completions is used twice
CLIP, BETA = 0.2, 0.02  # the ratio is clipped to 1 ± CLIP, and the KL weighs BETA

CHOOSING = np.array([12, 21, 30, 49, 58, 67, 76, 85, 94])  # held out, to choose settings with
HELD_OUT = np.array([17, 26, 35, 44, 53, 62, 71, 80, 99])  # held out, to report on
TRAINING = np.setdiff1d(np.arange(10, 100), [*CHOOSING, *HELD_OUT])


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
        drawn = torch.where((tokens[:, P:] == END).any(dim=1), END, drawn)  # then it's padding
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
    return tokens


def completion_mask(tokens):
    """Tell which tokens count, in the columns of log_probs: (N,L) -> (N,L-1) bool.

    tokens     8 8 = 4 1 + 4 7 . . . .
    log_probs    8 = 4 1 + 4 7 . . . .
    mask         - - x x x x x x - - -    the end counts, or nothing would teach it; padding doesn't
    """
    mask = torch.ones_like(tokens[:, 1:], dtype=torch.bool)  # (N,L-1)
    mask[:, : P - 1] = False  # the prompt
    mask[:, P:] = (tokens[:, P:-1] != END).cumprod(dim=1)  # (N,L-P-1) no end before this token
    return mask


def advantages(rewards):
    """Compare each completion with the mean of its group, in deviations: (B,G) -> (B,G)."""
    centered = rewards - rewards.mean(dim=1, keepdim=True)  # (B,G)
    return centered / (rewards.std(dim=1, correction=0, keepdim=True) + 1e-4)


def token_loss(now, old, ref, A, mask, beta=BETA, clip=CLIP, average="completion"):
    """Average -min(ρA, clip(ρ)A) + β·k3 over the tokens of completions: -> a scalar.

    `now`, `old` and `ref` (N,L-1) are log_probs now, when the completions were drawn, and of the
    base model. All tokens of a completion share its advantage, A (N,1). With d = log(q_ref/q), k3
    is exp(d) - 1 - d: over draws of q its mean is KL(q‖q_ref), but its gradient is KL(q_ref‖q)'s.
    Average completions first, as in the paper, all tokens at once (DAPO), or divide by a constant.
    """
    ratio = (now - old).exp()  # (N,L-1)
    objective = torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)  # (N,L-1)
    d = ref - now  # (N,L-1)
    k3 = d.exp() - 1 - d  # (N,L-1)
    loss = (beta * k3 - objective) * mask  # (N,L-1)
    if average == "completion":
        return (loss.sum(dim=1) / mask.sum(dim=1)).mean()
    return loss.sum() / {"token": mask.sum(), "constant": mask.numel()}[average]


def grpo_step(policy, reference, adamw, prompts, uniforms, advantages=advantages, **settings):
    """Complete the prompts, compare what came out, and update the policy."""
    tokens = generate(policy, prompts, uniforms)  # (N,L)
    mask = completion_mask(tokens)  # (N,L-1)
    A = advantages(reward(tokens).view(-1, G)).view(-1, 1)  # (N,1)
    with torch.no_grad():
        old, ref = log_probs(policy, tokens), log_probs(reference, tokens)  # each (N,L-1)
    for _ in range(UPDATES):
        now = log_probs(policy, tokens)  # (N,L-1), at first the same as `old`
        adamw.zero_grad()
        token_loss(now, old, ref, A, mask, **settings).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        adamw.step()


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


class Causal(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.trunk = Trunk(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, tokens):
        """Map tokens (N,L) to logits of the next ones (N,L,V)."""
        earlier = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()  # (L,L)
        return self.head(self.trunk(tokens, earlier.to(tokens.device)))  # padding is later: hidden


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
        muon.zero_grad()
        (-log_probs(model, tokens)[completion_mask(tokens)].mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
    return model


def draw_batch(numbers, seed):
    """Repeat each number's prompt G times: -> prompts (N,P), random numbers (N,L-P)."""
    prompts = encode([f"{number}=" for number in numbers for _ in range(G)])  # (N,P)
    uniforms = np.random.default_rng(seed).random((len(prompts), L - P), dtype=np.float32)
    return prompts, torch.from_numpy(uniforms)


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
