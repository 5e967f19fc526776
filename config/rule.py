# The same sums with the rule as the reward: 1 if the sum is correct, else 0. No judge is involved.
# That's a verifiable reward, the kind reasoning models are trained with.
#     python train_grpo.py config/rule.py

out_dir = "out-rule"
reward = "correct"
judge_checkpoint = ""
max_iters = 140  # half a minute, because there's no judge to ask
# As in the GRPO paper, the mean of the group is the baseline, and its deviation the scale.
baseline = "mean"
scale_rewards = "group"
# Nobody can fool a rule, so the KL doesn't have to hold the policy back. But without it the policy
# settles too early: on some inputs all completions are the same and wrong, and a group of equal
# rewards teaches nothing.
kl_beta = 0.05
