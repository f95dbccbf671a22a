#!/bin/sh
# Measure the committed figures of this machine again, on a quiet one, and draw what is made of them.
# Estimated, not measured, on two quiet cores: data 10 minutes, evaluation 40, runs 40, races 30, planted faults 60.
# Usage: tools/make_figures.sh [PYTHON [MACHINE]]; MACHINE begins the names of the files below profiles/
set -eu
cd "$(dirname "$0")/.."
PYTHON=${1:-python}
MACHINE=${2:-epyc}
accel() { "$PYTHON" -m lantern_accel "$@"; }

"$PYTHON" tools/lantern-emoji data
rm -f docs/evaluation/lantern-emoji.json # figures of older code are not continued
"$PYTHON" tools/lantern-emoji evaluate --model lantern-emoji -o docs/evaluation/lantern-emoji.json
accel evaluate --model lantern-emoji --grid docs/evaluation/forty.png --seed 0 --dtype float32
"$PYTHON" tools/evaluation_pages.py docs/evaluation/lantern-emoji.json
"$PYTHON" tools/readme_images.py docs

bench="profiles/bench/$MACHINE-lantern-emoji"
rm -f "$bench"-float32.json "$bench"-bfloat16.json
accel bench --batch 1 --repeats 4 --dtype float32 --strategy eagle -o "$bench-float32.json"
accel bench --batch 1 --repeats 4 --dtype bfloat16 --strategy eagle -o "$bench-bfloat16.json"

"$PYTHON" tools/publish.py

accel tune --dtype float32 --batch 1 -o tune.json
"$PYTHON" tools/ship_payoff.py tune.json profiles/choices/lantern-emoji.json
rm -f cpu-lantern-emoji.json tune.json
accel profile --device cpu --quick --samples 8 --quality-images 24 -o cpu-lantern-emoji.json
accel profiles add cpu-lantern-emoji.json --out build/checked --overwrite # only checks it: tests know the name below
mv cpu-lantern-emoji.json profiles/measured/cpu-lantern-emoji.json
accel compare profiles/measured/cpu-lantern-emoji.json -o profiles/measured/report.html
accel compare profiles/measured/cpu-lantern-emoji.json -o profiles/measured/report.md
"$PYTHON" tools/report_image.py profiles/measured/report.html docs/report.png

mkdir -p build
"$PYTHON" tests/mutants.py --sample 100 --seed 17 --json build/mutants.json
"$PYTHON" tools/figures.py
echo "build/mutants.json lists the planted faults that survived; read what the rule for defaults printed above"
