# GMPO (2507.20673) gives a word one ratio, the geometric mean of its letters' ratios. So one letter
# with an extreme ratio counts for less. GMPO clips the log of each letter's ratio before it takes
# the mean, with wider bounds than PPO. The paper takes the mean over a whole completion. We take it
# over a word, because with credit=word each word has an advantage of its own. Like the authors'
# script, this config makes eight updates per rollout and has no KL.
#     python train_grpo.py config/grpo_config.py config/gmpo.py

out_dir = "out-gmpo"
objective = "gmpo"
clip_eps = 0.4  # bounds log ρ, so that no ratio is pushed below exp(-0.4) = 0.67
clip_eps_high = 0.4  # nor above exp(0.4) = 1.49
baseline = "mean"
scale_rewards = "group"
kl_beta = 0.0
minibatch_size = 5  # an update takes 5 of a step's 40 inputs
num_iterations = 1
