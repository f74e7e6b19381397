# Two commands are enough: `make demo` and `make test`. Each makes its own environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
READY  := $(VENV)/.installed

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/glocal demo

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --hypothesis-profile ci

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.step

# torch goes first and alone, at the pinned version: what comes later finds it there and pulls no other build.
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
