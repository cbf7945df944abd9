# Commands for developers and for CI. A stamp file records the content of the environment, so a second
# call starts at once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Arguments of `make bench`, e.g. BENCH="--quick channels". Empty: every benchmark that needs no name.
BENCH ?=
# Cores and rounds of `make bench-peers`.
CORES ?= 0,1
ROUNDS ?= 3
# Each child loads the numerical libraries, and the placement assumes one thread in each process.
export OMP_NUM_THREADS ?= 1
# Test workers read compiled modules that an earlier worker wrote.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test e2e lint docs bench bench-peers clean

run: $(VENV)/installed
	$(BIN)/tianflow train cartpole_ppo --require-target

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not e2e" -n auto --maxprocesses 8 --dist worksteal

e2e: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m e2e -n 2 --dist worksteal

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documents as a site in build/site. Every link is checked: a warning is an error.
docs: $(VENV)/installed-docs
	$(BIN)/python -m mkdocs build --strict

bench: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks $(BENCH)

# A peer that cannot be installed is a row that says so. A round of Pong takes about ten minutes.
bench-peers: $(VENV)/installed-bench
	-$(BIN)/python -m benchmarks.peers.install
	$(BIN)/python -m benchmarks --cores $(CORES) --rounds $(ROUNDS) peers_cartpole
	$(BIN)/python -m benchmarks --cores $(CORES) --rounds 1 peers_pong
	$(BIN)/python -m benchmarks --cores $(CORES) --rounds $(ROUNDS) peers_served
	$(BIN)/python -m benchmarks.peers.table

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	touch $@
