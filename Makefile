# The two commands to know: `make demo` and `make test`. Each sets everything up by itself, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Threads that sleep while they wait: spinning ones slow each other down on few cores.
export OMP_WAIT_POLICY ?= PASSIVE
TEST_PROCESSES ?= 2

.PHONY: help setup demo test test-slow check format bench docs packages sanitize clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## create .venv and install sortrl into it (compiles the kernels)

$(VENV)/.ready: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt --editable '.[dev]'
	$(BIN)/sortrl info
	@touch $@

demo: setup  ## the main job, end to end: a trained Breakout agent becomes one that no attack at this eps can touch
	$(BIN)/sortrl robustify sortrl/Breakout10-v0 --teacher zoo/breakout/teacher --out runs/demo
	$(BIN)/sortrl watch runs/demo --beside-teacher

test: setup  ## the tests, docstring examples included
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal

test-slow: setup  ## the tests that take longer
	$(BIN)/python -m pytest -m slow

check: setup  ## format, lint and types
	$(BIN)/ruff format --check src tests bench examples docs
	$(BIN)/ruff check src tests bench examples docs
	$(BIN)/mypy

format: setup  ## rewrite the sources in the common format
	$(BIN)/ruff format src tests bench examples docs
	$(BIN)/ruff check --fix src tests bench examples docs

bench: setup  ## kernels against torch and against the machine's limit
	$(BIN)/sortrl bench --json results/bench.json

docs: setup  ## the documentation site, into site/; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

packages: setup  ## sdist and wheel, installed and tried in an environment without the source tree
	bash tests/packages.sh $(BIN)/python

sanitize: setup  ## the kernel tests on a build with address and undefined-behaviour sanitizers
	bash tests/sanitize.sh $(BIN)/python

clean:  ## remove what the other targets made
	rm -rf $(VENV) build runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
