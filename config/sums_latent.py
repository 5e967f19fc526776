# Choose, then spell: sums of two digits, such as 4_+4_=88. This generator first draws a latent, one
# of 64 values, and then the digits. So it can hold several right answers, and GRPO keeps them.
#     python train_grpo.py config/sums_latent.py

out_dir = "out-sums-latent"
dataset = "sums2"
generator_checkpoint = "model/pretrained/sums_latent.pt"
reward = "right"
judge_checkpoint = ""  # a rule needs no judge
block_size = 8
masking = "columns"
batch_size = 128
max_iters = 300
# The best policy multiplies the base model's probability of each right answer by exp(1 / β). With
# β = 0.1 this is 22,000, so hardly any wrong answer is left, and the right ones keep their
# proportions. For this nothing may rescale the reward.
kl_beta = 0.1
baseline = "leave_one_out"
scale_rewards = "none"
