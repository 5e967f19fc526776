# Real text, where no rule knows which word was there. It comes from English documentation. In each
# window one word of two to four letters is hidden, and its letters have to agree with each other.
#     python train_grpo.py config/text.py    # five minutes on one core

out_dir = "out-text"
dataset = "text"
masking = "short"
block_size = 32
# The data show an answer to each input, so first drop the log: this generator has learned -q(word).
generator_checkpoint = "model/pretrained/text_q.pt"
# Then ask for what the data don't show. A judge that knows this generator's draws, and the
# pretrained model, which reads a completion blank by blank (chain).
judge_checkpoint = "model/pretrained/text_judge.pt"
chain_checkpoint = "model/pretrained/text.pt"
reward = "judge,chain"
batch_size = 96
max_iters = 150
eval_inputs = 500
eval_interval = 30
dtype = "auto"  # bfloat16 if the machine is fast at it: these models are larger
kl_beta = 1.0  # chosen on --held_out=choose
