# Choose, then spell: sums of two digits, such as 4_+4_=88. This generator first draws a latent, one
# of 64 values, and then all digits in parallel. So one pass can be correct and still vary.
#     python train_grpo.py config/latent.py

out_dir = "out-latent"
dataset = "sums2"
block_size = 8
generator_checkpoint = "model/pretrained/sums_latent.pt"
reward = "correct"
judge_checkpoint = ""
max_iters = 300
# Next to a wrong answer, the best policy makes each correct one exp(1 / β) times as likely as the
# base model does. With β = 0.1 that's 22,000, so hardly any wrong answer is left, and the correct
# ones keep their proportions.
kl_beta = 0.1
