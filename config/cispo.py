# CISPO (MiniMax-M1, 2506.13585): the clip limits how much a letter that has moved counts, but it
# never takes the letter's gradient away. There is no lower bound. The paper does not say how large
# its upper bound is; 5 is that of ScaleRL (2510.13786), which found that it hardly matters. Each
# rollout serves 20 updates (16 in the paper), and there is no KL.
#     python train_grpo.py config/grpo_config.py config/cispo.py

out_dir = "out-cispo"
objective = "cispo"
clip_eps_high = 4.0  # the bound is 1 + 4; TRL writes epsilon_high=5
loss_type = "dapo"
baseline = "mean"
scale_rewards = "group"
kl_beta = 0.0
minibatch_size = 2  # of the 40 inputs of a step
num_iterations = 1
