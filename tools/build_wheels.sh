#!/usr/bin/env bash
# Build the wheels: pure Python, and one with the native CPU kernels for this machine's platform.
#
#   tools/build_wheels.sh DIST            both, the native one for this Linux alone
#   tools/build_wheels.sh DIST manylinux  the native one for any Linux of this processor family: run it in
#                                         quay.io/pypa/manylinux_2_28_x86_64 or ..._aarch64 (auditwheel)
set -euo pipefail
cd "$(dirname "$0")/.."
dist="${1:?give the folder for the wheels}"
python="${PYTHON:-python3}"

mkdir -p "$dist"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$dist" .
native="$(mktemp -d)"
trap 'rm -rf "$native" backends/lantern_accel_cpu/native/lantern_native.so' EXIT
LANTERN_ACCEL_BUILD_NATIVE=1 "$python" -m pip wheel --quiet --no-deps --wheel-dir "$native" .
if [ "${2:-}" = manylinux ]; then
  # Checks the symbols' versions, and gives the wheel the oldest platform that they allow.
  auditwheel repair --wheel-dir "$dist" "$native"/*.whl
else
  mv "$native"/*.whl "$dist"
fi
ls "$dist"
