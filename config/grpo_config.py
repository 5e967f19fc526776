# Sums with a learned judge. The model fills the blanks of 4_7+4_1=888 in one pass, and the reward
# is what a judge thinks of the result. A rule could tell exactly which sums are correct, but the
# policy never sees it: here it's only the referee, in the bar and in the table. That's the point.
# The judge stands in for all the tasks where no rule exists, and on this one we can check it.
#     python train_grpo.py config/grpo_config.py --group_size=16
#
# These values are also the program's defaults. The file lists those that are worth changing.

out_dir = "out"

# Whole columns of both summands are hidden: the ones, the tens, the hundreds, or several of them.
dataset = "sums"
masking = "columns"
block_size = 11
eval_inputs = 1500  # with 256 the same run may look two points better, or worse

generator_checkpoint = "model/pretrained/sums.pt"
judge_checkpoint = "model/pretrained/sums_judge.pt"
reward = "judge"

# We train and evaluate the model as it is, without help from a temperature or a truncation.
temperature = 1.0
top_p = 1.0

group_size = 16
batch_size = 128
num_iterations = 2  # drawing and judging take as long as two updates
max_iters = 200  # about a minute on one core; 400 steps get a little further
learning_rate = 1e-3  # far above an LLM's 1e-6 to 1e-5, because the model is so small
warmup_iters = 5
dtype = "float32"  # faster than bfloat16 for a network this small

# An ideal judge's score is log p/q_ref, with p the real sums and q_ref the base model. (Ours is
# off, mostly by a constant of each input, which the baseline removes.) With kl_beta = 1 the reward
# minus the KL is greatest if the policy is p itself, so nothing may rescale the reward. And a
# completion's own reward must stay out of its baseline, or it shrinks the advantage.
scale_rewards = "none"
baseline = "leave_one_out"
# But independent blanks can't be p. A smaller kl_beta lets them commit to one answer.
kl_beta = 0.25
