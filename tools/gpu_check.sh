#!/bin/sh
# What only a GPU can show, in less than five minutes: the tests that are marked gpu (losses in fp32 equal the CPU's),
# then the speed of a 1B model in bf16 against plain transformers, and offload() and onload(): see gpu_check.py. Where
# Megatron-Core is installed MegatronEngine is measured too, against Megatron-Core driven by hand; FP8 on Hopper.
# Where torch sees no GPU it says so and is done. `make venv` has to have run; nothing is installed.
#
#   tools/gpu_check.sh [options of gpu_check.py]
#   PYTHON=/path/to/python tools/gpu_check.sh

set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}

"$PYTHON" -c 'import torch' || {
    echo "gpu_check: $PYTHON has no torch; make venv, or PYTHON=…" >&2
    exit 1
}
if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.is_available())')" != True ]; then
    echo "gpu_check: skipped: torch sees no CUDA device"
    exit 0
fi
"$PYTHON" -m pytest -m gpu -q -p no:cacheprovider tests/test_gpu.py
engines=$("$PYTHON" -c 'from importlib.util import find_spec; print("fsdp", "archon", "megatron" if find_spec("megatron") else "")')
# shellcheck disable=SC2086  # several words
"$PYTHON" tools/gpu_check.py --engine $engines "$@"
