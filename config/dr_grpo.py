# Dr. GRPO (2503.20783) does not divide advantages by a standard deviation. It divides the loss of a
# completion by a constant, and not by the completion's own length.
#     python train_grpo.py config/grpo_config.py config/dr_grpo.py

out_dir = "out-dr-grpo"
loss_type = "dr_grpo"
baseline = "mean"
scale_rewards = "none"
