# What happens when nothing holds the policy back: the judge's score rises, variety is gone. Look at `entropy` and `distinct`.
#     python train_grpo.py config/grpo_config.py config/fooled.py

out_dir = "out-fooled"
kl_beta = 0.0
