# What happens when the judge is fooled: a judge of one layer, trained for half a minute, words of
# any length, and nothing that holds the policy back. The reward rises above that of the original
# text. Look at what is written, at `bits`, `exact`, `distinct` and `entropy`.
#     python train_grpo.py config/grpo_config.py config/fooled.py

out_dir = "out-fooled"
judge_checkpoint = "model/pretrained/judge_naive.pt"
masking = "word"
hidden_words = 2
kl_beta = 0.0
