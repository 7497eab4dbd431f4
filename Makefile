# One command each: make demo | demo-real | test | test-all | check. Everything runs in .venv, made at first use.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
# More options for pip when it installs torch, for instance an index with CPU builds.
TORCH_PIP_ARGS ?=
export OMP_NUM_THREADS ?= 1

.PHONY: venv check test test-all demo demo-real errors-page clean

venv: $(STAMP)

$(STAMP): requirements.lock requirements-nodeps.lock pyproject.toml
	@set -euo pipefail; \
	if [ ! -x $(BIN)/python ]; then \
	  python=""; found=""; \
	  for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	    version=$$($$name -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
	    found="$$found $$name=$$version"; \
	    if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "Meshwright needs Python 3.11 or later; found:$${found:- none}. Install python3.11 and run make again." >&2; \
	    exit 2; \
	  fi; \
	  echo "making $(VENV) with $$python"; \
	  $$python -m venv $(VENV); \
	fi; \
	echo "installing the versions of requirements.lock (once; some minutes)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_PIP_ARGS) torch==2.13.0; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-nodeps.lock; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	touch $(STAMP)

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/lint-imports
	$(BIN)/codespell src tests recipes docs README.md CONTRIBUTING.md CHANGELOG.md AGENTS.md Makefile
	$(BIN)/python -m meshwright explain --all-markdown | diff -u docs/errors.md - \
	  || { echo "docs/errors.md is not up to date: make errors-page" >&2; exit 1; }
	$(BIN)/pyright

test: $(STAMP)
	$(BIN)/python -m pytest tests/unit tests/fake tests/docs -m "not slow"
	$(BIN)/python -m pytest tests/gloo tests/nodes -m "not slow"  # a process of its own: ranks are forked from it

test-all: $(STAMP)
	$(BIN)/python -m pytest tests

demo: $(STAMP)
	$(BIN)/python -m meshwright.orchestrate.demo

demo-real: $(STAMP)
	$(BIN)/python -m meshwright.orchestrate.demo_real

errors-page: $(STAMP)
	$(BIN)/python -m meshwright explain --all-markdown > docs/errors.md

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
