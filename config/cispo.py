# CISPO (MiniMax-M1, 2506.13585) puts an upper bound on the ratio, so that a letter whose
# probability has risen a lot does not count too much. Every letter keeps its gradient. There is no
# lower bound. The paper does not give the value of the upper bound. We take 5 from ScaleRL
# (2510.13786), which found that the value hardly matters. Each rollout serves 20 updates (16 in the
# paper), and there is no KL.
#     python train_grpo.py config/grpo_config.py config/cispo.py

out_dir = "out-cispo"
objective = "cispo"
clip_eps_high = 4.0  # the upper bound is 1 + 4; in TRL this is epsilon_high=5
loss_type = "dapo"
baseline = "mean"
scale_rewards = "group"
kl_beta = 0.0
minibatch_size = 2  # an update takes 2 of a step's 40 inputs
num_iterations = 1
