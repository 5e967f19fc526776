# The same sums without a judge, a rule or data. The reward is the base model's own log-probability
# of a completion, read one blank at a time, so that here each blank sees those before it. GRPO
# teaches it to write in one pass what it likes when it reads slowly.
#     python train_grpo.py config/chain.py

out_dir = "out-chain"
reward = "chain"
judge_checkpoint = ""
max_iters = 200
kl_beta = 0.25
