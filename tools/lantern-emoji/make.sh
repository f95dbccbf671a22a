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
python "$here" bundle "$to" --work "$work" \
  --licence "Apache-2.0 (weights); image data: see NOTICE"
# The drafter learns on from what the model itself draws with these defaults.
lantern-accel train drafter --model "$to" --work "$work/own" --config "$here/drafter-own.json" \
  --prompts "$here/prompts.txt" --samples "$(wc -l < "$here/prompts.txt")" --into "$to"
python "$here" prompts > "$work/head.txt"
lantern-accel train head --model "$to" --work "$work" --prompts "$work/head.txt" --samples 8400 --into "$to"
python "$here" evaluate --model "$to" -o "$to/eval.json"
lantern-accel evaluate --model "$to" --grid "$to/grid.png"
