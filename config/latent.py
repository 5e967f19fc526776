# Choose, then spell: a generator that draws a latent of 64 values for each hidden word, then its
# letters. GRPO with the judge of its own draws gains agreement and variety.
#     python train_grpo.py config/grpo_config.py config/latent.py

out_dir = "out-latent"
generator_checkpoint = "model/pretrained/generator_latent.pt"
judge_checkpoint = "model/pretrained/judge_latent.pt"
kl_beta = 0.7  # it need not commit: nearer to 1, and nearer to the text
max_iters = 60  # it gains for longer
