# Choose, then spell: a generator that draws a latent of 64 values for each hidden word, then its
# letters. The judge learned from this generator's own draws. GRPO makes the letters of
# a word agree, and its fills stay varied.
#     python train_grpo.py config/grpo_config.py config/latent.py

out_dir = "out-latent"
generator_checkpoint = "model/pretrained/generator_latent.pt"
judge_checkpoint = "model/pretrained/judge_latent.pt"
kl_beta = 1.0  # this policy need not commit, and at 1 the optimum is nearly the text itself
max_iters = 60  # it gains for longer
batch_size = 64  # with 32 it ends with a little less variety
