# Real text, where no rule knows which word was there. It comes from English documentation. In each
# window one word of two to four letters is hidden, and its letters have to agree with each other.
#     python train_grpo.py config/text.py    # six minutes on one core

out_dir = "out-text"
dataset = "text"
masking = "short"
block_size = 32
generator_checkpoint = "model/pretrained/text.pt"
chain_checkpoint = "model/pretrained/text.pt"
judge_checkpoint = "model/pretrained/text_judge.pt"
batch_size = 96  # with half of it, half of the gain
max_iters = 150
eval_inputs = 500
eval_interval = 30
dtype = "auto"  # bfloat16 if the machine is fast at it: these models are larger
# Chosen on --held_out=choose. If the judge's score were log p/q_ref, 1 would ask for the text
# itself, as far as independent blanks can be that. Smaller ones please the judge more and the text
# less.
kl_beta = 1.0
