# RLOO (2402.14740) is REINFORCE with a special baseline, which is the mean reward of the other
# completions of the group. The completion's own reward has no part in that mean, so the estimate of
# the policy gradient has no bias. The paper puts the KL into the reward. Here it stays in the loss.
#     python train_grpo.py config/grpo_config.py config/rloo.py

out_dir = "out-rloo"
loss_type = "sum"
baseline = "leave_one_out"
scale_rewards = "none"
objective = "reinforce"
num_iterations = 1
