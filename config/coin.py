# A coin for all blanks: a generator whose head gives 8 sets of logits, one for each value of a
# latent that all blanks of a completion see. Each value commits, and together they keep variety.
#     python train_grpo.py config/grpo_config.py config/coin.py

out_dir = "out-coin"
generator_checkpoint = "model/pretrained/generator_coin.pt"
kl_of = "marginal"  # holds what the values are together, and lets each commit
kl_target = 0.4  # of the marginals, which move less than each value does
