# Sums: a rule is the reward. The model fills the blanks of 4_7+4_1=888 in one pass, and earns 1 if
# the sum is right, and 0 if not. This takes half a minute.
#     python train_grpo.py config/sums.py

out_dir = "out-sums"
dataset = "sums"
generator_checkpoint = "model/pretrained/sums.pt"
reward = "right"
judge_checkpoint = ""  # a rule needs no judge
block_size = 11
masking = "columns"
batch_size = 128
# This is GRPO as published: the mean of the group is the baseline, and its deviation the scale.
baseline = "mean"
scale_rewards = "group"
kl_beta = 0.0  # nobody can fool a rule, so the policy need not stay near the base model
max_iters = 60
