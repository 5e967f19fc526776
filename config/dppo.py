# DPPO (2602.04879): what is bounded is not the ratio of a letter's probability but its change. On
# its way from 0.01 to 0.05 a clip of the ratio stops a rare letter at 0.012, though hardly anything
# has changed yet; this does not. Like the paper, it does not divide advantages by their deviation.
#     python train_grpo.py config/grpo_config.py config/dppo.py

out_dir = "out-dppo"
objective = "dppo"
clip_eps = 0.15  # of a probability, downwards
clip_eps_high = 0.15  # and upwards
baseline = "mean"
scale_rewards = "none"
kl_beta = 0.0
minibatch_size = 10  # of the 40 inputs of a step: a bound needs more than one update per rollout
num_iterations = 1
