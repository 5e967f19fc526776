# GMPO (2507.20673): one ratio for a word, the geometric mean of its letters' ratios, so that a
# single letter that has moved far does not decide. Each letter is clipped before the mean is taken,
# in log space, and more widely than usual. (The paper takes the mean over a whole completion. Here
# it is over a word, because with credit=run each word has an advantage of its own.) Like the
# authors' script, this makes eight updates per rollout and has no KL.
#     python train_grpo.py config/grpo_config.py config/gmpo.py

out_dir = "out-gmpo"
objective = "gmpo"
clip_eps = 0.4  # of log ρ: a push ends at the ratio exp(-0.4) = 0.67 or exp(0.4) = 1.49
clip_eps_high = 0.4
baseline = "mean"
scale_rewards = "group"
kl_beta = 0.0
minibatch_size = 5  # of the 40 inputs of a step
num_iterations = 1
