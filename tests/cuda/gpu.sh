#!/usr/bin/env bash
# Everything we'd like to ask a GPU, in twelve minutes at most. From the repository's root:
#
#     bash tests/cuda/gpu.sh
#
# Each part writes its output to out-gpu/ (or to $OUT), and its last lines to the screen. A part
# that fails doesn't stop the next one, so look for the lines that begin with ==.
export OUT=${OUT:-out-gpu} PYTHONUNBUFFERED=1 PYTHONPATH=.
mkdir -p "$OUT"

part() {  # part SECONDS NAME COMMAND...
    local limit=$1 name=$2
    shift 2
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "== $name: exit code $?"
    tail -n 60 "$OUT/$name.log" | cut -c1-160
}

part 90 tests python3 -m pytest -q -p no:cacheprovider --tb=short tests/cuda
if command -v compute-sanitizer >/dev/null; then
    # PyTorch asks the driver things it may not know, and that's no error of ours
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 part 120 memcheck compute-sanitizer --error-exitcode 9 \
        --report-api-errors no \
        python3 -m pytest -q -p no:cacheprovider tests/cuda -k "cuda:0 and scores"
fi
part 60 run python3 train_grpo.py config/quick.py --out_dir="$OUT/run"
part 60 pretrain python3 -m model.pretrain --dataset=sums --block_size=11 --n_layer=2 --n_embd=32 \
    --masking=columns --judge_masking=columns --generator_steps=2 --judge_steps=2 \
    --out_dir="$(mktemp -d)/models"
part 300 times python3 -m tests.cuda.times
for compile in False True; do
    part 60 "command-$compile" bash -c "time python3 train_grpo.py config/grpo_config.py \
        --compile=$compile --out_dir=$OUT/command-$compile"
done
