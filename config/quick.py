# A whole run in a few seconds. It writes every file and prints every line that a longer run does,
# but it's too short to learn much.
#     python train_grpo.py config/quick.py

out_dir = "out-quick"
batch_size = 32
group_size = 8
max_iters = 10
eval_inputs = 100
