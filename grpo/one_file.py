"""Teach a model to solve sums with GRPO (2402.03300), in one file.

    python -m grpo.one_file    # in the project's folder, a minute on one core

The generator fills all blanks of a sum such as `4_7+4_1=888` in one step. No blank sees what the
others get, so few sums are correct. The judge is a second network, which has learned to tell real
sums from the generator's. GRPO fills each input G times, and makes the digits of completions that
the judge prefers more likely and those of the others less likely, until the blanks agree. You can't
backpropagate through sampling a digit, and you don't have to. `is_correct` knows the truth, but
it's only the referee: training never asks it. Given the same inputs, config/grpo_config.py takes
the same steps, and a test compares them.

Shapes: B inputs, T characters of each, G completions of each input, V characters of the vocabulary.
"""

import math

import numpy as np
import torch

from model.transformer import Generator, Judge, TransformerConfig

VOCABULARY = " abcdefghijklmnopqrstuvwxyz_0123456789+="  # a token is an index into these
BLANK = VOCABULARY.index("_")
B, G, T = 128, 16, 11
STEPS, WARMUP = 200, 5  # while it warms up, the learning rate rises
UPDATES = 2  # each group of completions is used twice
LEARNING_RATE = 1e-3
CLIP = 0.2  # the ratio is clipped to 1 ± CLIP
BETA = 0.25  # the weight of the KL
SCORE_LIMIT = 8  # a score is cut off at ±8 nats


def log_q(generator, masked):
    """Compute the log-probability of each character at each position: (B,T) -> (B,T,V)."""
    logits = generator(masked)  # (B,T,V); the network has no dropout
    return logits.double().log_softmax(dim=-1)  # double, so that probabilities add up to 1


def sample(log_probs, masked, uniforms):
    """Fill each blank G times: (B,T,V), (B,T), (B,G,T) -> completions (B,G,T)."""
    # Each character owns a piece of [0,1), whose length is its probability. Which one was hit?
    ends = log_probs.exp().cumsum(dim=-1)[:, None]  # (B,1,T,V) where the pieces end
    characters = (ends <= uniforms[..., None]).sum(dim=-1)  # (B,G,T)
    return torch.where(masked[:, None] == BLANK, characters, masked[:, None])


def reward(judge, completions, mask):
    """Score completions by how sure the judge is that they're real: (B,G,T), (B,T) -> (B,G).

    The judge returns a logit for each character, and the score is their mean over the blanks. If it
    knew what was hidden, the best score would be log(p/q_ref), with p the probability of a
    completion among real sums, and q_ref that under the base model.
    """
    texts, which = completions.view(-1, T).unique(dim=0, return_inverse=True)  # judge each once
    logits = torch.cat([judge(part) for part in texts.split(32)])  # (texts,T)
    logits = logits[which].view(completions.shape)  # (B,G,T)
    scores = (logits * mask[:, None]).sum(dim=-1) / mask.sum(dim=-1)[:, None]  # (B,G)
    return scores.clamp(-SCORE_LIMIT, SCORE_LIMIT)


def advantages(rewards):
    """Compare each completion with the mean of the others in its group: (B,G) -> (B,G)."""
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (G - 1)  # (B,G)
    return rewards - others


def grpo_loss(now, old, ref, completions, A, mask):
    """Average -min(ρA, clip(ρ)A) + β·KL(q‖q_ref) over completions, blanks and inputs: -> a scalar.

    `now`, `old` and `ref` (B,T,V) are log q of the generator now, of the one that drew the
    completions, and of the frozen base model. A is a completion's advantage (B,G), and mask (B,T)
    is True at blanks. ρ = q/q_old says how much more likely a character has become since it was
    drawn. In the first update it's 1, and the gradient of ρA is A ∇log q. Summed over blanks and
    averaged over draws, that's the gradient of the expected reward, because ∇q = q ∇log q. Once ρ
    is above 1.2 with A > 0, or below 0.8 with A < 0, the minimum is constant and stops pushing. The
    KL makes it rarer that an input's completions all become one wrong sum, with nothing to compare.
    """
    A = A[:, :, None]  # (B,G,1)
    moved = (now - old).gather(-1, completions.mT)  # (B,T,G) how far log q has moved
    ratio = moved.mT.exp()  # (B,G,T)
    objective = torch.minimum(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A).mean(dim=1)  # (B,T)
    kl = (now.exp() * (now - ref)).sum(dim=-1)  # (B,T)
    loss = (BETA * kl - objective) * mask  # (B,T)
    return (loss.sum(dim=1) / mask.sum(dim=1)).mean()


def train(generator, reference, judge, sums):
    """Take all steps, yielding the loss of each."""
    adamw = torch.optim.AdamW(generator.parameters(), betas=(0.9, 0.99), weight_decay=0)
    for step in range(STEPS):
        cosine = (1 + math.cos(math.pi * max(0, step - WARMUP) / (STEPS - WARMUP))) / 2  # 1 to 0
        adamw.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / (WARMUP + 1), cosine)
        masked, uniforms = draw_batch(sums, B, (1, step))
        mask = masked == BLANK  # (B,T)
        with torch.no_grad():  # one forward pass serves all G completions
            old, ref = log_q(generator, masked), log_q(reference, masked)  # each (B,T,V)
            completions = sample(old, masked, uniforms)  # (B,G,T)
            A = advantages(reward(judge, completions, mask))  # (B,G)
        total = 0
        for _ in range(UPDATES):
            now = log_q(generator, masked)  # (B,T,V)
            loss = grpo_loss(now, old, ref, completions, A, mask)
            adamw.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(generator.parameters(), 1.0)
            adamw.step()
            total += loss.item()
        yield total / UPDATES


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


def load(kind, path):
    saved = torch.load(path, weights_only=True)
    network = kind(TransformerConfig(**saved["architecture"]))
    network.load_state_dict(saved["weights"])
    return network


def decode(tokens):
    return ["".join(VOCABULARY[i] for i in row) for row in tokens.reshape(-1, T).tolist()]


def is_correct(text):
    """Tell whether a sum such as 417+471=888 holds. No summand starts with a 0."""
    first, second, result = text[:3], text[4:7], text[8:]
    allowed = (first + second).isdigit() and "0" not in (first[0], second[0])
    return allowed and int(first) + int(second) == int(result)


@torch.no_grad()
def evaluate(generator, masked, uniforms):
    """Fill inputs: -> the first completion of each, as texts, and the share of correct sums."""
    completions = sample(log_q(generator, masked), masked, uniforms)  # (B,G,T)
    return decode(completions[:, 0]), np.mean([is_correct(text) for text in decode(completions)])


if __name__ == "__main__":
    torch.set_num_threads(1)  # for a network this small, more would wait for each other
    sums, held_out = make_sums()
    masked, uniforms = draw_batch(held_out, 256, (2**31,))
    generator, reference = (load(Generator, "model/pretrained/sums.pt") for _ in range(2))
    judge = load(Judge, "model/pretrained/sums_judge.pt")
    before, share = evaluate(reference, masked, uniforms)
    print(f"step 0: correct on held-out sums {share:.3f}")
    for step, loss in enumerate(train(generator, reference, judge, sums), 1):
        if step % 20 == 0 or step == STEPS:
            after, share = evaluate(generator, masked, uniforms)
            print(f"step {step}: correct on held-out sums {share:.3f}, loss {loss:.3f}")
    for i in range(3):
        for name, texts in {"input": decode(masked), "before": before, "after": after}.items():
            print(f"{name:7s}", texts[i])
