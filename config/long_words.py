# The hard case: words of any length, and a generator that was trained four times as long, so that
# there is less for GRPO to add. Look at `exact` and `distinct`.
#     python train_grpo.py config/grpo_config.py config/long_words.py

out_dir = "out-long"
generator_checkpoint = "model/pretrained/generator_long.pt"
masking = "word"
hidden_words = 2
kl_beta = 0.03  # more words, less certain scores: the KL weighs less
kl_target = 0.0
eval_inputs = 256
