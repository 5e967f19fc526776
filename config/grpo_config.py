# The default experiment: one parallel step learns to hide its seams. Whole words are hidden, where
# blanks clash worst. They are short, so that a small model can learn to agree on them in minutes.
# (These are the program's defaults, too. What is worth turning stands here with its reason.)
#     python train_grpo.py config/grpo_config.py

out_dir = "out"
masking = "short"
hidden_words = 3
eval_inputs = 256

# We draw and evaluate from the model as it is, without help from a temperature or truncation.
temperature = 1.0
top_p = 1.0

group_size = 16
batch_size = 40  # several inputs per step, because much of the gradient's noise is theirs
num_iterations = 2  # the judge is most of a step's time, and need not be asked again
max_iters = 30
learning_rate = 1e-3  # far above an LLM's 1e-6 to 1e-5, because the model is so small
warmup_iters = 5

# The reward of a word is the judge's log p/q, with p the distribution of the text and q that of the
# base model. With kl_beta = 1 the expected reward minus the KL is greatest where the policy is p.
# So nothing may rescale the reward, and a fill's baseline may not contain its own reward.
judge_score = "log_odds"
scale_rewards = "none"
baseline = "leave_one_out"
# But no policy with independent blanks equals p. With kl_beta = 1 the blanks stay undecided, and
# with less they commit to one word.
kl_beta = 0.65
credit = "run"  # a word need not answer for the other words of its input
