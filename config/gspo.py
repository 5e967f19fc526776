# GSPO (2507.18071): one ratio for a whole completion, clipped far tighter since its logarithm is a
# mean; four updates per rollout.
#     python train_grpo.py config/grpo_config.py config/gspo.py

out_dir = "out-gspo"
importance_sampling_level = "sequence"
baseline = "mean"
scale_rewards = "group"
kl_beta = 0.0
clip_eps = 3e-4
clip_eps_high = 4e-4
minibatch_size = 16
num_iterations = 1
