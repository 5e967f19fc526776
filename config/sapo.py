# SAPO (2511.20347) does not clip. It gives a letter less and less weight, the further the letter's
# probability moves from what it was at the draw. The weight falls a little faster for letters that
# should become less likely, which kept the training stable in the paper. Like the paper, this makes
# four updates per rollout.
#     python train_grpo.py config/grpo_config.py config/sapo.py

out_dir = "out-sapo"
objective = "sapo"
sapo_tau = 1.0
sapo_tau_negative = 1.05
baseline = "mean"
scale_rewards = "group"
kl_beta = 0.0
minibatch_size = 10  # an update takes 10 of a step's 40 inputs
num_iterations = 1
