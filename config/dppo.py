# DPPO (2602.04879) bounds how much a letter's probability changes, and not the ratio. Suppose that
# a rare letter is about to rise from 0.01 to 0.05. A clip of the ratio stops it at 0.012, though
# its probability has hardly changed. DPPO lets it rise. Like the paper, this file does not divide
# advantages by their standard deviation.
#     python train_grpo.py config/grpo_config.py config/dppo.py

out_dir = "out-dppo"
objective = "dppo"
clip_eps = 0.15  # a probability may fall by this much
clip_eps_high = 0.15  # and rise by this much
baseline = "mean"
scale_rewards = "none"
kl_beta = 0.0
# An update takes 10 of a step's 40 inputs. The bounds can act from a step's second update on.
minibatch_size = 10
num_iterations = 1
