# Real text, where no rule knows which word was there, and the judge is all you have. It comes from
# English documentation, and we hide whole words of two to four letters: their letters clash most.
#     python train_grpo.py config/text.py

out_dir = "out-text"
dataset = "text"
masking = "short"
block_size = 64
generator_checkpoint = "model/pretrained/text.pt"
judge_checkpoint = "model/pretrained/text_judge.pt"
batch_size = 40
max_iters = 100
eval_inputs = 256
eval_interval = 20
dtype = "auto"  # bfloat16 if the machine is fast at it: these models are larger
kl_beta = 0.4
