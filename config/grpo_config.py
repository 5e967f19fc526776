# The default experiment: one parallel step learns to hide its seams. Whole words are hidden, where
# blanks clash worst: short ones, which a small model can learn to agree on in minutes. (These are
# the program's defaults, too; what is worth turning stands here with its reason.)
#     python train_grpo.py config/grpo_config.py

out_dir = "out"
masking = "short"
hidden_words = 3

# Sampled and evaluated as the model is, without help: no temperature, no truncation.
temperature = 1.0
top_p = 1.0

group_size = 16
batch_size = 64  # many inputs per step: the gradient's noise is mostly that of the inputs
num_iterations = 2  # the judge is most of a step's time, and need not be asked again
max_iters = 30  # twice as many raise valid words by another 0.02
learning_rate = 1e-3  # 100 times an LLM's: a million parameters, a fresh reward
warmup_iters = 5

# The reward of a word is log p/q, what the judge says of the text's distribution p and the base
# model's q. E[log p/q] - kl_beta KL is then best, with kl_beta 1, where the policy is p: nothing is
# to be scaled, and no mean may hold a part of the reward back. Below 1, as a judge that does not
# know all asks for, it goes beyond p, as seen from q.
judge_score = "log_odds"
scale_rewards = "none"
baseline = "leave_one_out"
kl_beta = 0.4
credit = "run"  # a word need not answer for the others
eval_inputs = 256
