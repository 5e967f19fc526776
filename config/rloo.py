# RLOO (2402.14740) is REINFORCE with the mean of the others as its baseline. This is the unbiased
# policy gradient, as the theorem writes it. (The paper has the KL in the reward. Here it stays in
# the loss.)
#     python train_grpo.py config/grpo_config.py config/rloo.py

out_dir = "out-rloo"
loss_type = "sum"
baseline = "leave_one_out"
scale_rewards = "none"
importance_sampling_level = "none"
num_iterations = 1
credit = "input"  # credit=run would be a bias
