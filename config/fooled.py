# What happens when nothing holds the policy back: judge and valid words rise, variety is gone. Look at `entropy`, `exact` and `distinct`.
#     python train_grpo.py config/grpo_config.py config/fooled.py

out_dir = "out-fooled"
kl_beta = 0.0
