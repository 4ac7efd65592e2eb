#!/usr/bin/env bash
# Train a head for a real model on its own answers, and measure it, in commands of under ten minutes.
#
#   bash benchmarks/train_head.sh MODEL GSM8K WORK [ALGORITHM [TRAIN_SECONDS [key=value ...]]]
#
# MODEL is a folder or a GGUF file, GSM8K a folder with gsm8k_train.jsonl and gsm8k_test.jsonl, WORK a folder for answers,
# the head and the results. The same command goes on where the last one stopped: it writes the answers, trains for
# TRAIN_SECONDS in all (900 if left out), and measures the head. LIMIT is how long one command may take (560 seconds).
set -euo pipefail
model=$1 data=$2 work=$3 algorithm=${4:-eagle3} seconds=${5:-900}
shift $(($# < 5 ? $# : 5))
limit=${LIMIT:-560}
# Run as modules: a script's own folder would be searched first, and other packages ask for one called ``kernels``.
export PYTHONPATH=$(cd "$(dirname "$0")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH}
head=$work/$algorithm
left() { echo $((limit - SECONDS)); }

mkdir -p "$work"
folder=${model%.gguf}
[ "$folder" = "$model" ] || "${PYTHON:-python3}" -m benchmarks.fetch_models "$model" "$folder"
if [ ! -e "$head/training_report.json" ]; then
    # Stopped at the limit, it goes on from its last checkpoint the next time.
    timeout "$(left)" "${PYTHON:-python3}" -m specgraph train draft="$algorithm" model="$folder" \
        data="$data/gsm8k_train.jsonl" output="$head" rollout.file="$work/answers.jsonl" heldout=64 \
        eval_drafts=4 chain.steps=4 max_length=640 rollout.chat=true rollout.max_new_tokens=320 rollout.answer_temperature=0.7 \
        head.draft_vocab_size=32000 optim.batch_size=32 optim.learning_rate=5e-4 optim.steps=20000 optim.eval_every=250 \
        optim.checkpoint_every=200 optim.max_seconds="$seconds" "$@" ||
        { echo "stopped with code $?: run the same command again to go on"; exit 0; }
fi
if [ "$(left)" -gt 60 ]; then
    "${PYTHON:-python3}" -m benchmarks.real_models "$folder" --draft "$head" --drafters ngram --k 2 4 --sets gsm8k \
        --gsm8k "$data/gsm8k_test.jsonl" --prompts 40 --peer-prompts 8 --new-tokens 192 --out "$work/measured.jsonl" \
        --budget "$(($(left) - 50))" ${MEASURE:-}
fi
echo "the report: $head/training_report.json; the cells: $work/measured.jsonl"
