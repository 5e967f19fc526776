# Choose, then spell. For each hidden word this generator first draws a latent, one of 64 values,
# and then the letters. The judge learned from this generator's own draws. GRPO makes the letters of
# a word agree, and the fills stay varied.
#     python train_grpo.py config/grpo_config.py config/latent.py

out_dir = "out-latent"
generator_checkpoint = "model/pretrained/generator_latent.pt"
judge_checkpoint = "model/pretrained/judge_latent.pt"
# With kl_beta = 1 the best policy is the distribution of the text (see config/grpo_config.py). A
# policy with a latent can come close to that, because the letters of a word can agree even if the
# word varies from draw to draw.
kl_beta = 1.0
max_iters = 60  # this policy keeps improving after 30 steps
batch_size = 64
