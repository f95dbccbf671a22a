#!/bin/sh
# Make environments in which tests/unit/integrations runs SGLang's and vLLM-Omni's own releases, without a card:
#     tools/engines.sh FOLDER
#     FOLDER/sglang/bin/python -m pytest -n 0 -m long tests/unit/integrations/test_sglang.py
#     FOLDER/vllm-omni/bin/python -m pytest -n 0 -m long tests/unit/integrations/test_vllm_omni.py
# Call it where torch for the CPU and lantern-accel[test] are installed: the environments use both. Wheels of the
# servers come without what they depend on, and of that only what their registries and stages import.
set -eu
folder=$1
checkout=$(cd "$(dirname "$0")/.." && pwd)
common="psutil msgspec pyzmq orjson pybase64 aiohttp einops ipython cloudpickle xxhash regex requests loguru accelerate==1.12.0
  compressed-tensors==0.18.0 nvidia-ml-py imageio imageio-ffmpeg setproctitle partial_json_parser python-dateutil PyYAML diskcache
  lark cachetools cbor2 blake3 py-cpuinfo gguf tiktoken sentencepiece protobuf msgpack prometheus-client"
site=$(python -c 'import sys; print("\n".join(one for one in sys.path if one.endswith("-packages")))')

make() { # name, wheels without what they depend on, packages
  python -m venv "$folder/$1"
  own=$("$folder/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$site" "$checkout" "$checkout/backends" > "$own/zz_caller.pth"
  # The caller's torch stays: nothing here may bring another one, nor what belongs to a card.
  "$folder/$1/bin/pip" install -q --no-compile --no-deps $2 torchvision==0.28.0 triton
  "$folder/$1/bin/pip" install -q --no-compile --no-warn-conflicts $3
  "$folder/$1/bin/pip" install -q --no-compile --no-deps -e "$checkout"
}

make sglang "sglang==0.5.23 transformers==5.19.0 diffusers==0.37.0 tokenizers==0.23.2 cache-dit==1.5.1 apache-tvm-ffi==0.1.11" \
  "$common addict dill"
make vllm-omni "vllm-omni==0.30.0 vllm==0.30.0 transformers==5.14.1 diffusers==0.40.0 cache-dit==1.5.0" \
  "$common fastapi openai omegaconf aenum prettytable soundfile soxr watchfiles python-json-logger pydantic-settings
  janus uvloop prometheus-fastapi-instrumentator openai-harmony ijson mcp llguidance depyf lm-format-enforcer outlines_core xgrammar"
