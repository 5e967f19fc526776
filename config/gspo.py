# GSPO (2507.18071): one ratio for a whole completion, the geometric mean of its letters' ratios.
# Its logarithm is a mean, so the paper clips it far tighter. There are four updates per rollout,
# and no KL. All blanks of a completion share an advantage, as in the paper.
#     python train_grpo.py config/grpo_config.py config/gspo.py

out_dir = "out-gspo"
importance_sampling_level = "sequence"
credit = "input"
baseline = "mean"
scale_rewards = "group"
kl_beta = 0.0
clip_eps = 3e-4
clip_eps_high = 4e-4
minibatch_size = 10  # of the 40 inputs of a step
num_iterations = 1
