# DAPO (2503.14476) weighs all blanks of the step alike, has a wider upper clip, and no KL. "When it
# goes wrong" in config/README.md shows what comes of that. Its dynamic sampling and its length
# penalty have no counterpart here.
#     python train_grpo.py config/grpo_config.py config/dapo.py

out_dir = "out-dapo"
loss_type = "dapo"
baseline = "mean"
scale_rewards = "group"
clip_eps_high = 0.28
minibatch_size = 20  # clipping needs more than one update per rollout
kl_beta = 0.0
num_iterations = 1
