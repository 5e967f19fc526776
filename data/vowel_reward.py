"""An example of a reward of your own, which pays for vowels.

    python train_grpo.py --reward=judge:1,data/vowel_reward.py:vowels:2

Shapes: B masked inputs, G completions of each, T characters.
"""

import torch


def vowels(completions, masked, mask, decode):
    """Give each vowel 1 and everything else 0: (B,G,T) -> (B,G,T).

    masked (B,T) are the inputs, and mask (B,T) says where their blanks are. `decode` turns tokens
    into a flat list of texts. The reward of a word is the mean over its blanks.
    """
    found = [[c in "aeiou" for c in text] for text in decode(completions)]  # B·G texts
    return torch.tensor(found, dtype=torch.float32).view(completions.shape)
