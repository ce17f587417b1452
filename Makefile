# The only commands of this project. Each prepares what it needs; a second run reinstalls nothing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
# Extra arguments for pip, e.g. PIP_ARGS="--extra-index-url URL" to choose a CUDA build of torch (see README).
PIP_ARGS ?=
TORCH  ?= torch==2.13.0
# What `test-mixed` runs as one of its nodes: torch 2.4 has wheels for Python up to 3.12.
OLD_TORCH  ?= 2.4.1
OLD_PYTHON ?= $(PYTHON)
# Extra arguments of its benchmark, e.g. MIXED_ARGS="--model llama --steps 10 --takeover-steps 0".
MIXED_ARGS ?=
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-mixed lint types arch bench bench-wan clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | column -t -s "$$(printf '\t')" 2>/dev/null || grep -E '##' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 10) else "FusionLLM needs Python >= 3.10, this is %d.%d; choose another with PYTHON=python3.x" % v)'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing: install it (Debian/Ubuntu: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt "$(TORCH)"
	$(PY) -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP) ## make the virtual environment with everything pinned

quickstart: setup ## train a small GPT-2 across four node processes in two fences
	$(BIN)/fusionllm train examples/quickstart.toml

test: setup ## all tests, with an end-to-end run of the quickstart at a few steps
	$(PY) -m pytest

test-mixed: setup ## one run over an old torch, JAX and the pinned torch (2 GB in .venv-old)
	PIP_ARGS="$(PIP_ARGS)" tools/old_torch.sh .venv-old $(OLD_PYTHON) $(OLD_TORCH)
	$(PY) -m benchmarks mixed --nodes torch:.venv-old/python jax torch $(MIXED_ARGS) --json

lint: setup ## ruff: style, imports, formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy, strict
	$(BIN)/mypy

arch: setup ## the floors of the house, checked by import-linter; and the core without torch
	$(BIN)/lint-imports
	$(PY) tools/check_core_without_torch.py

bench: setup ## every benchmark of the results table, one after the other
	$(PY) -m benchmarks all --json

bench-wan: setup ## ours beside torch's pipeline on an emulated wide-area network (root, docs/testbed.md)
	$(PY) -m benchmarks wan --scenario $(or $(SCENARIO),two-labs) --methods all --rounds 3 --json

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-old .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build src/*.egg-info
