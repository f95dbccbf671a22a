#!/bin/sh
# Make every figure, plot and table of the evaluation's and benchmarks' pages again, on a quiet machine.
# Estimated, not measured, on two quiet cores: data 10 minutes, evaluation 40, runs 40, planted faults 60.
# Usage: tools/make_figures.sh [PYTHON]
set -eu
cd "$(dirname "$0")/.."
PYTHON=${1:-python}
accel() { "$PYTHON" -m lantern_accel "$@"; }

accel train data
rm -f docs/evaluation/lantern-emoji.json  # figures of older code are not continued
accel evaluate --model lantern-emoji -o docs/evaluation/lantern-emoji.json --plots docs/evaluation
accel evaluate --model lantern-emoji --grid docs/evaluation/forty.png --seed 0
"$PYTHON" tools/evaluation_pages.py docs/evaluation/lantern-emoji.json

rm -f bench.json exact-dtype.json cpu-lantern-emoji.json
accel bench --batch 1 --repeats 8 -o bench.json
accel bench --batch 1 --repeats 4 --dtype float32 --strategy vanilla --strategy eagle -o exact-dtype.json
accel profile --device cpu --quick --samples 8 --quality-images 24 -o cpu-lantern-emoji.json
mv cpu-lantern-emoji.json profiles/measured/cpu-lantern-emoji.json
accel compare profiles/measured/cpu-lantern-emoji.json -o profiles/measured/report.html
accel compare profiles/measured/cpu-lantern-emoji.json -o profiles/measured/report.md
"$PYTHON" tools/mutants.py --sample 100 --seed 17 --json docs/mutants.json
echo "bench.json and exact-dtype.json: copy their tables into docs/benchmarks.md; then list docs/mutants.json's"
echo "survivors in docs/mutants.md, and read what the rule for defaults printed above"
