# What happens when nothing holds the policy back: the judge is fooled. Its score rises, the words are its own inventions.
#     python train_grpo.py config/grpo_config.py config/fooled.py

out_dir = "out-fooled"
kl_beta = 0.0
