# Sums: a rule is the reward. The model fills the blanks of 4_7+4_1=888 in one pass, and earns 1 if
# the sum is right, and 0 if not. After 120 steps nine of ten held-out sums are right, and with
# --max_iters=300 more than nineteen of twenty.
#     python train_grpo.py config/sums.py

out_dir = "out-sums"
dataset = "sums"
generator_checkpoint = "model/pretrained/sums.pt"
reward = "right"
judge_checkpoint = ""  # a rule needs no judge
block_size = 11
masking = "columns"
# A rule costs little, so the groups are large. In the same time, 64 inputs with 32 fills learn more
# than 128 with 16.
batch_size = 64
group_size = 32
max_iters = 120
# This is GRPO as published: the mean of the group is the baseline, and its deviation the scale.
baseline = "mean"
scale_rewards = "group"
# Nobody can fool a rule, so the KL need not hold the policy back. But without it the policy settles
# too early: on some inputs all fills are equal and wrong, and a group of equal rewards teaches
# nothing. A little KL keeps several digits likely until one of the fills is right.
kl_beta = 0.05
