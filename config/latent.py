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
# The best policy multiplies the base model's probability of each correct answer by exp(1 / β). With
# β = 0.1 that's 22,000, so hardly any wrong answer is left, and the correct ones keep their
# proportions.
kl_beta = 0.1
