# TR-DPO's idea (2404.09656) for GRPO: the reference follows the policy, so the KL limits how fast
# the policy moves, and no longer how far it gets from the base model.
#     python train_grpo.py config/grpo_config.py config/moving_reference.py

out_dir = "out-moving-reference"
reference_mode = "ema"
ema_alpha = 0.02
