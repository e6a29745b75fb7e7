# Everything runs in .venv, which the first target that needs it makes: Python >= 3.11 and a C++ compiler are enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup
BUILT := $(VENV)/.built
DEV := $(VENV)/.dev
MLFLOW := $(VENV)/.mlflow
PEERS := $(VENV)/.peers
DOCS := $(VENV)/.docs
SERVE_PEERS := $(VENV)/.serve_peers
PIP := -m pip install --quiet --disable-pip-version-check
INSTALL := $(BIN)/python $(PIP)
REQUIREMENTS := $(BIN)/python tools/requirements.py
CODE := src tests benchmarks examples tools
NATIVE := $(addprefix src/rowwise/,tables/ops/_cpp/* ingest/_cpp/* tables/ids/_cpp/* planning/planner/_c/* tables/store/_c/* tables/store/_cpp/*)
FUZZERS := $(wildcard tests/fuzz/*.cpp tests/fuzz/*.h)
FAST := -m 'not slow and not dist and not gpu and not bench'
SLOW := -m '(slow or dist or hypothesis) and not gpu and not bench'
TEST := $(BIN)/python -m pytest --forks 2

# A pipe fails if any of its commands does.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

# What was compiled once is kept: test modules take as long to compile as to run.
export PYTHONDONTWRITEBYTECODE =

# Idle OpenMP threads that spin take the cores from those that work.
export OMP_WAIT_POLICY = passive

.PHONY: help demo peers test test-change test-all test-native test-nightly build wheel lint sanitize test-arm fuzz docs bench bench-smoke clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train a small model for half a minute, and write a report"
	@echo "make test      lint, types, import rules and the fast tests: at most 240 s of processor time"
	@echo "make test-change  the slow tests that the change since the last green night may break, as CI runs them"
	@echo "make test-all  all slow tests: full matrices, real processes, random examples"
	@echo "make test-nightly  everything, sanitizers, ARM and benchmarks included; a summary in tests/nightly.json"
	@echo "make build     set up .venv and build the native operators"
	@echo "make wheel     a wheel that runs without a compiler, in dist; MACHINE=aarch64 for ARM"
	@echo "make lint      what 'make test' does before the tests"
	@echo "make sanitize  the native tests under the address and undefined-behaviour sanitizers"
	@echo "make test-arm  the native tests on an emulated ARM processor"
	@echo "make fuzz      the native planner and caches, by inputs that reach new code; SECONDS=60 for each of three"
	@echo "make docs      the documentation as a site, in build/site"
	@echo "make bench     lookup and update beside other libraries"
	@echo "make bench-smoke  every benchmark, tiny: does it run, and are its results right?"
	@echo "make clean     remove what was made, .venv included"
	@echo "Python is $(PYTHON); choose another with PYTHON=/path/to/python3"

build: $(BUILT)

$(SETUP): pyproject.toml tools/setup.sh tools/requirements.py
	tools/setup.sh "$(PYTHON)" "$(VENV)"
	@touch $@

$(BUILT): $(SETUP) CMakeLists.txt $(wildcard $(NATIVE))
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV): $(SETUP)
	$(REQUIREMENTS) dev retrieval serve | $(INSTALL) -r /dev/stdin
	@touch $@

$(PEERS): $(BUILT) $(DEV)
	$(REQUIREMENTS) cluster judges kafka lake mlflow notebook oip onnx wandb | $(INSTALL) -r /dev/stdin
	$(REQUIREMENTS) frameworks peers | $(INSTALL) --no-deps -r /dev/stdin
	@touch $@

$(MLFLOW): $(SETUP)  # apart from the rest, because a server has older packages than a run
	$(BIN)/python -m venv $(VENV)/mlflow
	$(VENV)/mlflow/bin/python $(PIP) mlflow
	@touch $@

$(SERVE_PEERS): $(SETUP)  # servers that are compared, apart from the rest
	$(PYTHON) -m venv $(VENV)/serve_peers
	$(VENV)/serve_peers/bin/python $(PIP) torch==2.13.0
	$(REQUIREMENTS) serve_peers | $(VENV)/serve_peers/bin/python $(PIP) -r /dev/stdin
	@touch $@

$(DOCS): $(BUILT) $(DEV)
	$(REQUIREMENTS) docs | $(INSTALL) -r /dev/stdin
	@touch $@

wheel: $(SETUP)
	$(REQUIREMENTS) wheel | $(INSTALL) -r /dev/stdin
	tools/wheel.sh $(BIN)/python $(MACHINE)

demo: build
	$(BIN)/rowwise train dlrm-synthetic

lint: build $(DEV)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/clang-format --dry-run --Werror $(NATIVE) $(FUZZERS)
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

test: lint
	$(TEST) --budget $(FAST)

peers: $(PEERS) $(DOCS) $(MLFLOW) wheel  # what slow tests compare with, look at and start
	tools/browser.sh
	tools/promtool.sh $(BIN)
	tools/redis.sh
	tools/slurm.sh

test-change: peers
	$(TEST) --full --change $(SLOW)
	if $(BIN)/python tools/since.py --native; then $(MAKE) test-native ONLY='not slow'; fi

test-all: peers
	$(TEST) --full --random $(SLOW)

test-native: build $(DEV)
	$(MAKE) -j 2 -O sanitize test-arm
	tools/fuzz.sh -seed=1 -runs=1000

test-nightly: $(DEV)
	$(BIN)/python tools/nightly.py

sanitize: build $(DEV)
	tools/sanitize.sh $(BIN)/python $(if $(ONLY),-m '$(ONLY)')

test-arm: build $(DEV)
	tools/arm.sh $(BIN)/python

fuzz:
	tools/fuzz.sh -max_total_time=$(or $(SECONDS),60)

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "look at it: $(BIN)/python -m http.server --directory build/site"

bench: $(PEERS)
	$(BIN)/rowwise bench ops

bench-smoke: $(PEERS)
	$(TEST) --full -m bench

clean:
	rm -rf $(VENV) build dist .hypothesis .ruff_cache .import_linter_cache
