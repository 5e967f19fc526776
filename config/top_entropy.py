# "Beyond the 80/20 rule" (2506.01939) lets only the most uncertain fifth of the blanks learn from
# the reward. The KL still acts on all blanks.
#     python train_grpo.py config/grpo_config.py config/top_entropy.py

out_dir = "out-top-entropy"
top_entropy_quantile = 0.2
