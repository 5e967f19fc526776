# The default experiment. A model fills all blanks in one parallel step, and learns to choose
# letters that agree. We hide whole words, because the letters of a word clash most. The words are
# short, so that a small model can learn this in minutes. These values are also the defaults of the
# program. This file lists those that are worth changing, with reasons.
#     python train_grpo.py config/grpo_config.py

out_dir = "out"
masking = "short"
eval_inputs = 256

# We train and evaluate the model as it is, without help from a temperature or truncation.
temperature = 1.0
top_p = 1.0

group_size = 16
batch_size = 40  # many, because much of the gradient's noise comes from which inputs we draw
num_iterations = 2  # judging takes most of the time, and a second update needs no judge
max_iters = 30
learning_rate = 1e-3  # far above an LLM's 1e-6 to 1e-5, because the model is so small
warmup_iters = 5

# The reward of a word is the judge's log p/q_ref. Here p is the distribution of the text, and q_ref
# is the base model's. With kl_beta = 1 the expected reward minus the KL is greatest if the policy
# is p.
# So nothing may rescale the reward. A fill's own reward must also stay out of its baseline, because
# it would shrink the advantage.
scale_rewards = "none"
baseline = "leave_one_out"
# But our policy cannot equal p, because its blanks are independent. With kl_beta = 1 many blanks
# stayed undecided between several letters. With a smaller kl_beta they agree on a word.
kl_beta = 0.65
