# This is a whole run in under half a minute. It writes every file and prints every line that a
# longer run does, but it is too short to learn much.
#     python train_grpo.py config/grpo_config.py config/quick.py

out_dir = "out-quick"
batch_size = 16
group_size = 8
max_iters = 10
eval_inputs = 32
