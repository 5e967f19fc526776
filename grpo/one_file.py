"""Teach a model to solve sums with GRPO (2402.03300), in one file.

    python -m grpo.one_file    # in the project's folder

The generator fills all blanks of a sum such as `4_7+4_1=888` in one step. No blank sees what the
others get, so few sums are correct. A rule can check a sum, but you can't backpropagate through
sampling a digit. GRPO doesn't need to. It fills each input G times, and makes the digits of correct
completions more likely and those of wrong ones less likely, until the blanks agree. With a judge,
`reward` would return a second network's score. Given the same inputs, config/rule.py takes the same
steps, and a test compares them.

Shapes: B inputs, T characters of each, G completions of each input, V characters of the vocabulary.
"""

import math

import numpy as np
import torch

from model.transformer import Generator, TransformerConfig

VOCABULARY = " abcdefghijklmnopqrstuvwxyz_0123456789+="  # a token is an index into these
BLANK = VOCABULARY.index("_")
B, G, T = 128, 16, 11
STEPS, WARMUP = 140, 5  # while it warms up, the learning rate rises
UPDATES = 2  # each group of completions is used twice
LEARNING_RATE = 1e-3
CLIP = 0.2  # the ratio is clipped to 1 ± CLIP
BETA = 0.05  # the weight of the KL


def load(path="model/pretrained/sums.pt"):
    saved = torch.load(path, weights_only=True)
    generator = Generator(TransformerConfig(**saved["architecture"]))
    generator.load_state_dict(saved["weights"])
    return generator


def make_sums():
    """Make the sums of data/sums, as texts: those to train on, and those of held-out results."""
    rng = np.random.default_rng(0)
    results = np.arange(200, 1000)
    shuffled = np.stack([rng.permutation(results[results % 10 == d]) for d in range(10)])  # (10,80)
    # Columns 8 to 79 are for training, 4 to 7 are held out, and 0 to 3 were for choosing settings.
    parts = []
    for some, size, seed in ((shuffled[:, 8:], 200_000, 1), (shuffled[:, 4:8], 4_000, 2)):
        rng = np.random.default_rng(seed)
        result = rng.choice(np.sort(some.ravel()), size)  # (size,)
        first = rng.integers(100, result - 99)  # (size,)
        parts.append([f"{a}+{c - a}={c}" for a, c in zip(first, result)])
    return parts


def draw_batch(sums, size, seed):
    """Draw sums, hide columns of both summands: -> masked (B,T), random numbers (B,G,T)."""
    rng = np.random.default_rng((*seed, 0))
    chosen = rng.integers(len(sums), size=size)  # (B,)
    masked = torch.tensor([[VOCABULARY.index(c) for c in sums[i]] for i in chosen])  # (B,T)
    for row in masked:
        columns = rng.permutation(3)[: rng.integers(1, 4)]  # of the hundreds, tens and ones
        row[[*columns, *(columns + 4)]] = BLANK
    uniforms = np.random.default_rng((*seed, 1)).random((size, G, T), dtype=np.float32)
    return masked, torch.from_numpy(uniforms)


def log_q(generator, masked):
    """Compute the log-probability of each character at each position: (B,T) -> (B,T,V)."""
    logits = generator(masked)  # (B,T,V); the network has no dropout
    return logits.double().log_softmax(dim=-1)  # double, so that sums of them reach 1


def sample(log_probs, masked, uniforms):
    """Fill each blank G times: (B,T,V), (B,T), (B,G,T) -> completions (B,G,T)."""
    # Each character owns a piece of [0,1), whose length is its probability. Which one was hit?
    ends = log_probs.exp().cumsum(dim=-1)[:, None]  # (B,1,T,V) where the pieces end
    characters = (ends <= uniforms[..., None]).sum(dim=-1)  # (B,G,T)
    return torch.where(masked[:, None] == BLANK, characters, masked[:, None])


def is_correct(text):
    """Tell whether a sum such as 417+471=888 holds. No summand starts with a 0."""
    first, second, result = text[:3], text[4:7], text[8:]
    allowed = (first + second).isdigit() and "0" not in (first[0], second[0])
    return allowed and int(first) + int(second) == int(result)


def decode(tokens):
    return ["".join(VOCABULARY[i] for i in row) for row in tokens.reshape(-1, T).tolist()]


def reward(completions):
    """Reward a completion with 1 if its sum is correct, else 0: (B,G,T) -> (B,G)."""
    correct = [float(is_correct(text)) for text in decode(completions)]
    return torch.tensor(correct).view(completions.shape[:2])


def advantages(rewards):
    """Compare each completion with its group: (B,G) -> (B,G). Equal rewards give 0."""
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    return centered / (rewards.std(dim=1, keepdim=True, correction=0) + 1e-4)


def grpo_loss(now, old, ref, completions, A, mask):
    """Average -min(ρA, clip(ρ)A) + β·KL(q‖q_ref) over completions, blanks and inputs: -> a scalar.

    `now`, `old` and `ref` (B,T,V) are log q of the generator now, of the one that drew the
    completions, and of the frozen base model. A is a completion's advantage (B,G), and mask (B,T)
    is True at blanks. ρ = q/q_old says how much more likely a character has become since it was
    drawn. In the first update it's 1, and the gradient of ρA is A ∇log q. Averaged over draws,
    that's the gradient of the expected reward, because ∇q = q ∇log q. Once ρ is above 1.2 with A >
    0, or below 0.8 with A < 0, the minimum is constant and stops pushing. The KL keeps the
    completions of an input from all becoming the same wrong sum, with nothing left to compare.
    """
    A = A[:, :, None]  # (B,G,1)
    moved = (now - old).gather(-1, completions.mT)  # (B,T,G) how far log q has moved
    ratio = moved.mT.exp()  # (B,G,T)
    objective = torch.minimum(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A).mean(dim=1)  # (B,T)
    kl = (now.exp() * (now - ref)).sum(dim=-1)  # (B,T)
    loss = (BETA * kl - objective) * mask  # (B,T)
    return (loss.sum(dim=1) / mask.sum(dim=1)).mean()


def train(generator, reference, sums):
    """Take all steps, yielding the loss of each."""
    adamw = torch.optim.AdamW(generator.parameters(), betas=(0.9, 0.99), weight_decay=0)
    for step in range(STEPS):
        cosine = (1 + math.cos(math.pi * max(0, step - WARMUP) / (STEPS - WARMUP))) / 2  # 1 to 0
        adamw.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / (WARMUP + 1), cosine)
        masked, uniforms = draw_batch(sums, B, (1, step))
        with torch.no_grad():  # one forward pass serves all G completions
            old, ref = log_q(generator, masked), log_q(reference, masked)  # each (B,T,V)
        completions = sample(old, masked, uniforms)  # (B,G,T)
        A = advantages(reward(completions))  # (B,G)
        total = 0
        for _ in range(UPDATES):
            now = log_q(generator, masked)  # (B,T,V)
            loss = grpo_loss(now, old, ref, completions, A, masked == BLANK)
            adamw.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(generator.parameters(), 1.0)
            adamw.step()
            total += loss.item()
        yield total / UPDATES


@torch.no_grad()
def evaluate(generator, masked, uniforms):
    """Fill inputs: -> the first completion of each, as texts, and the share of correct sums."""
    completions = sample(log_q(generator, masked), masked, uniforms)  # (B,G,T)
    return decode(completions[:, 0]), reward(completions).mean().item()


if __name__ == "__main__":
    sums, held_out = make_sums()
    masked, uniforms = draw_batch(held_out, 256, (2**31,))
    generator, reference = load(), load()
    before, share = evaluate(reference, masked, uniforms)
    print(f"step 0: correct on held-out sums {share:.3f}")
    for step, loss in enumerate(train(generator, reference, sums), 1):
        if step % 20 == 0 or step == STEPS:
            after, share = evaluate(generator, masked, uniforms)
            print(f"step {step}: correct on held-out sums {share:.3f}, loss {loss:.3f}")
    for i in range(3):
        for name, texts in {"input": decode(masked), "before": before, "after": after}.items():
            print(f"{name:7s}", texts[i])
