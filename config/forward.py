# Follow the forward KL. GRPO moves probability to what it draws often. Here each group of 64 fills
# is weighed by how likely the goal writes them, and the policy is fitted to that. It keeps more
# variety and leaves more misspellings, which the row "letters at 0" of the table then removes.
#     python train_grpo.py config/grpo_config.py config/latent.py config/forward.py

out_dir = "out-forward"
direction = "forward"
kl_beta = 0.0  # the weights hold the reference already
batch_size = 16  # inputs, with as many fills in a step as config/latent.py has
group_size = 64  # many, because the weights compare the fills of a group with each other
max_iters = 120
learning_rate = 5e-4
