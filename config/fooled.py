# What happens when the judge is fooled: one of a single layer, trained for half a minute, and
# nothing that holds the policy back. The reward rises above that of the original text. Look at what
# is written, at `bits`, `exact`, `distinct` and `entropy`.
#     python train_grpo.py config/grpo_config.py config/fooled.py

out_dir = "out-fooled"
judge_checkpoint = "model/pretrained/judge_naive.pt"
kl_beta = 0.0
