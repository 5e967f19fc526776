# Dr. GRPO (2503.20783) divides neither by the group's standard deviation nor by a completion's own
# length.
#     python train_grpo.py config/grpo_config.py config/dr_grpo.py

out_dir = "out-dr-grpo"
loss_type = "dr_grpo"
baseline = "mean"
scale_rewards = "none"
