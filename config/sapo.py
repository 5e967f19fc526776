# SAPO (2511.20347): no clip, but a weight that falls off smoothly as the letter's probability moves
# away from the one it was drawn with. It falls a little faster for letters that should become less
# likely, which the paper found to keep the training stable. Like the paper, this makes four updates
# per rollout.
#     python train_grpo.py config/grpo_config.py config/sapo.py

out_dir = "out-sapo"
objective = "sapo"
sapo_tau = 1.0
sapo_tau_negative = 1.05
baseline = "mean"
scale_rewards = "group"
kl_beta = 0.0
minibatch_size = 10  # of the 40 inputs of a step
num_iterations = 1
