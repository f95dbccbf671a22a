#!/bin/bash
# Train a draft head for your own model and see what it gains:
#   examples/draft_head.sh MODEL prompts.txt work
# MODEL is a name, official files or a model folder. The model generates its own training images, so no data is needed.
# SAMPLES is their number, and CONFIG a file of settings for `lantern-accel train head`.
set -euo pipefail
model=$1
prompts=$2
work=$3
lantern-accel train head --model "$model" --prompts "$prompts" --samples "${SAMPLES:-2000}" --work "$work" \
    ${CONFIG:+--config "$CONFIG"}
for head in none "$work/head"; do
    echo "head: $head"
    lantern-accel generate --model "$model" --use "head=$head" --prompts "$prompts" --strategy scd --seed 7 \
        --overwrite -o "$work/image.png"
done
