# `make demo` and `make test` create their own environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
READY  := $(VENV)/.installed
TESTED := $(VENV)/.installed-test
TORCH  := torch==2.13.0
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --hypothesis-profile ci

.PHONY: demo test test-all test-without-fast docs demo-report lint format lock bench clean

demo: $(READY)
	$(BIN)/glocal demo

# Lint, types and the tests that carry the value: about five minutes on two cores.
test: lint
	$(PYTEST) -m "not slow"

# The rest of the tests, the Triton kernels in Triton's interpreter, and the core without the optional accelerations.
test-all: $(TESTED)
	$(PYTEST) -m slow
	TRITON_INTERPRET=1 $(PYTEST) tests/fast/kernels
	$(MAKE) test-without-fast

# Delete glocal/fast from a copy: the core must pass its tests, only slower.
test-without-fast: $(TESTED)
	BIN=$(abspath $(BIN)) .ci/without_fast

# The pages of docs/ as a site in docs/_build; warnings are errors. Takes about 20 seconds.
docs: $(TESTED)
	rm -rf docs/_build
	$(BIN)/python -m sphinx -q -W --keep-going -d docs/_build/.doctrees docs docs/_build

# The report that docs/report.md shows, from new runs: about two minutes.
demo-report: $(TESTED)
	$(BIN)/glocal demo
	$(BIN)/glocal report demo/runs -o docs/demo-report.html

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TESTED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(TESTED)
	$(BIN)/python -m benchmarks.step

# All packages are installed at the versions and with the hashes of requirements.txt, and nothing else: torch, whose builds
# for CPUs and GPUs have other hashes, by its version, with the libraries of CUDA that its build asks for.
$(READY): pyproject.toml requirements.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "glocal needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes --no-deps -r requirements.txt
	$(PIP) install $(TORCH)
	$(PIP) install --no-build-isolation --no-deps -e .
	touch $@

# What the tests, the documentation and the extras need on top of it.
$(TESTED): $(READY) requirements-test.txt
	$(PIP) install --require-hashes --no-deps -r requirements-test.txt
	touch $@

# Write requirements.txt and requirements-test.txt: the hashes of all files, for every platform. Versions stay unless UPGRADE
# says otherwise, such as `make lock UPGRADE='--upgrade-package rich'`, or --upgrade. It needs uv.
LOCK := uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-annotate --no-emit-index-url \
  --custom-compile-command 'make lock' pyproject.toml -
without = awk '/^[^ ]/ {skip = /^($(1))/} !skip'
lock:
	cp requirements-test.txt .lock
	printf '%s\n' '$(TORCH)' setuptools | $(LOCK) --extra test $(UPGRADE) -o .lock
	$(call without,torch==|nvidia-|cuda-) .lock > requirements-test.txt
	printf '%s\n' '$(TORCH)' setuptools | $(LOCK) --constraint .lock | $(call without,torch==|nvidia-|cuda-|triton==) > requirements.txt
	rm .lock

clean:
	rm -rf $(VENV) .venv-* demo build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
