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
max_iters = 110
learning_rate = 1e-3  # 100 times an LLM's: a million parameters, a fresh reward
warmup_iters = 5
kl_beta = 0.09  # the weight of the KL at kl_target
kl_target = 0.65  # nats a blank; farther: more valid words, less entropy; nearer: the other way
credit = "run"  # a word need not answer for the others
scale_rewards = "batch"  # where all fills are hopeless, their noise is not scaled up
eval_inputs = 512
