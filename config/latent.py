# Choose, then spell. For each hidden word this generator first draws a latent, one of 64 values,
# and then the letters. The judge learned from this generator's own draws. GRPO makes the letters of
# a word agree, and the fills stay varied.
#     python train_grpo.py config/grpo_config.py config/latent.py

out_dir = "out-latent"
generator_checkpoint = "model/pretrained/generator_latent.pt"
judge_checkpoint = "model/pretrained/judge_latent.pt"
kl_beta = 1.0  # this policy need not commit to one word; with 1 the best policy is nearly the text
max_iters = 60  # it keeps improving for longer
batch_size = 64  # with 32 it ends with a little less variety
