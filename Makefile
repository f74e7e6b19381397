# `make demo` and `make test` create their own environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
READY  := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --hypothesis-profile ci

.PHONY: demo test test-all test-without-fast lint format bench clean

demo: $(READY)
	$(BIN)/glocal demo

# Lint, types and the tests that carry the value: about five minutes on two cores.
test: lint
	$(PYTEST) -m "not slow"

# The rest of the tests, the Triton kernels in Triton's interpreter, and the core without the optional accelerations.
test-all: $(READY)
	$(PYTEST) -m slow
	TRITON_INTERPRET=1 $(PYTEST) tests/fast/kernels
	$(MAKE) test-without-fast

# Delete glocal/fast from a copy: the core must pass its tests, only slower.
test-without-fast: $(READY)
	BIN=$(abspath $(BIN)) .ci/without_fast

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.step

# torch is installed first and alone, at the pinned version, so that nothing pulls another build.
$(READY): pyproject.toml constraints.txt tests/oracles.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "glocal needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[test]'
	$(PIP) install -c constraints.txt --no-deps -r tests/oracles.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-* demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
