# RLOO (2402.14740): REINFORCE with the mean of the others as baseline. The unbiased policy
# gradient, as the theorem writes it. (Its KL is in the reward; here it stays in the loss.)
#     python train_grpo.py config/grpo_config.py config/rloo.py

out_dir = "out-rloo"
loss_type = "sum"
baseline = "leave_one_out"
scale_rewards = "none"
importance_sampling_level = "none"
num_iterations = 1
credit = "input"  # credit by run is a bias
