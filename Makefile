# Two commands do everything: `make serve` and `make test`. Both set up .venv first, and skip what is there.
#   make serve ARGS="--port 8001 --model model.gguf"
#   make test-full    the slow suites too
#   make test-compat  other programs' clients against the server, in .venv-compat
#   make check        ruff, mypy, import-linter, style check
#   make bench        the benchmarks that need no other server
# TORCH="torch==2.13.0 --extra-index-url ..." chooses another build of torch, PYTHON=python3.12 another Python.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
TORCH := torch==2.13.0

# A broken folder would look like a finished one to the next `make`.
define make-venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "surefoot needs Python 3.11 or newer, $(PYTHON) is not: choose one with PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -m venv $(1) \
	|| { rm -rf $(1); echo "$(PYTHON) cannot make $(1): install venv (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
endef

.PHONY: serve test test-full test-compat check bench setup setup-dev clean

serve: setup
	$(BIN)/surefoot serve $(ARGS)

test: setup-dev check
	$(BIN)/python -m pytest -m "not slow and not compat"

test-full: setup-dev check
	$(BIN)/python -m pytest -m "not compat"

test-compat: setup-dev .venv-compat/installed
	$(BIN)/python -m pytest -m compat

check: setup-dev
	$(BIN)/ruff format --check src tests tools benchmarks
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/style_check.py src/surefoot

bench: setup-dev
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/load.py

setup: .venv/installed
setup-dev: .venv/installed-dev

.venv/bin/python:
	@echo "--- making .venv with $$($(PYTHON) --version)"
	$(call make-venv,.venv)

.venv/installed: pyproject.toml .venv/bin/python
	@echo "--- installing surefoot and what it needs into .venv (README.md says how large that is)"
	$(BIN)/pip install --disable-pip-version-check $(TORCH) -e '.[bench]'
	@touch $@

.venv/installed-dev: pyproject.toml .venv/installed
	@echo "--- installing what the tests need"
	$(BIN)/pip install --disable-pip-version-check $(TORCH) -e '.[dev]'
	@touch $@

.venv-compat/installed: tests/compat/requirements.txt
	@echo "--- installing lm-eval and guidellm into .venv-compat"
	$(call make-venv,.venv-compat)
	.venv-compat/bin/pip install --disable-pip-version-check $(TORCH) -r tests/compat/requirements.txt
	@touch $@

clean:
	rm -rf .venv .venv-compat build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
