# GSPO (2507.18071) gives a whole completion one ratio, the geometric mean of its letters' ratios.
# This mean moves less than a single ratio does, so the paper clips it far tighter. There are four
# updates per rollout, and no KL. All blanks of a completion share an advantage, as in the paper.
#     python train_grpo.py config/grpo_config.py config/gspo.py

out_dir = "out-gspo"
objective = "gspo"
baseline = "mean"
scale_rewards = "group"
kl_beta = 0.0
clip_eps = 3e-4
clip_eps_high = 4e-4
minibatch_size = 10  # an update takes 10 of a step's 40 inputs
num_iterations = 1
