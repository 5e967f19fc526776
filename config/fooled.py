# Reward hacking you can measure. This judge was trained like the good one, but for 150 steps
# instead of 8,000, and nothing else differs. Its AUC is nearly as high. Watch the policy find out
# what it doesn't know: `correct` stays behind `accepts`.
#     python train_grpo.py config/fooled.py

out_dir = "out-fooled"
judge_checkpoint = "model/pretrained/sums_judge_weak.pt"
