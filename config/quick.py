# This takes the whole path in under half a minute, with every file that a run writes and every line
# that it prints. It is too short to learn much.
#     python train_grpo.py config/grpo_config.py config/quick.py

out_dir = "out-quick"
batch_size = 16
group_size = 8
max_iters = 10
eval_inputs = 32
