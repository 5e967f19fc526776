# Sums with a learned judge. The reward is what the judge says, and the policy never sees the rule:
# it's only the referee, in the bar and in the table. It stands in for all the tasks where no rule
# exists; that one exists here is what lets us check.
#     python train_grpo.py config/sums.py config/judge.py

out_dir = "out-judge"
reward = "judge"
judge_checkpoint = "model/pretrained/sums_judge.pt"
batch_size = 128
group_size = 16
max_iters = 200
dtype = "float32"  # faster than bfloat16 for a network this small
# The judge's score is log p/q_ref in nats, and β weighs it against the KL, so nothing may rescale
# it. β = 1 would ask for the data itself, which independent blanks can't be. A smaller one lets
# them commit to one answer.
scale_rewards = "none"
baseline = "leave_one_out"
kl_beta = 0.28
