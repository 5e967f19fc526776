# Here the policy learns to fool a weak judge. The judge has one layer and trained for half a
# minute, and no KL holds the policy back. The reward rises above that of the original text. Look at
# what the policy writes, and at `exact` and `distinct` in the table.
#     python train_grpo.py config/grpo_config.py config/fooled.py

out_dir = "out-fooled"
judge_checkpoint = "model/pretrained/judge_naive.pt"
kl_beta = 0.0
