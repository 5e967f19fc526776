# DAPO (2503.14476) weighs all blanks of an update alike. A ratio may rise further than it may fall
# before it is clipped, and there is no KL. The table of text in config/README.md shows what
# happens without a KL. We leave out DAPO's dynamic sampling and its length penalty.
#     python train_grpo.py config/grpo_config.py config/dapo.py

out_dir = "out-dapo"
loss_type = "dapo"
baseline = "mean"
scale_rewards = "group"
clip_eps_high = 0.28
minibatch_size = 20  # two updates per rollout of 40 inputs; the first update clips nothing
kl_beta = 0.0
num_iterations = 1
