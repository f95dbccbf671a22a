#!/usr/bin/env bash
# Makes the bundled model from nothing: tools/lantern-emoji/make.sh WORK FOLDER. Every stage resumes.
set -euo pipefail
work="$1" to="$2" here="$(cd "$(dirname "$0")" && pwd)"

python "$here" data
python "$here" tokenizer --work "$work" --config "$here/tokenizer.json"
python "$here" tokenizer --work "$work" --config "$here/decoder.json"
python "$here" target --work "$work" --config "$here/target-small.json"
python "$here" target --work "$work" --config "$here/target.json"
python "$here" drafter --work "$work" --config "$here/drafter.json"
lantern-accel train bundle "$to" --work "$work" --name lantern-emoji --cfg-scale 1.5 --top-k 256 \
  --top-p 0.7 --tree 0,1,00,01,10,000,001,100 --lambda 2 --lantern-k 10 --delta 0.6 \
  --licence "Apache-2.0 (weights); image data: see NOTICE"
# The drafter learns on from what the model itself draws with these defaults.
lantern-accel train drafter --model "$to" --work "$work/own" --config "$here/drafter-own.json" \
  --prompts "$here/prompts.txt" --samples "$(wc -l < "$here/prompts.txt")" --into "$to"
python "$here" head --model "$to"
python "$here" evaluate --model "$to" -o "$to/eval.json"
lantern-accel evaluate --model "$to" --grid "$to/grid.png"
