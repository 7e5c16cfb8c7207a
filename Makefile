# `make demo` and `make test` set up everything they need in .venv/, once. `make help` lists the targets.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check --no-input
# Extra arguments: PIP_ARGS for pip install, HOROVOD_ARGS for install-horovod, PYTEST_ARGS for both pytest runs.
PIP_ARGS     ?=
HOROVOD_ARGS ?=
PYTEST_ARGS  ?=

# One stamp per step of the set-up: a step runs again when what it depends on has changed.
MACHINE      := $(VENV)/.stamp-machine
REQUIREMENTS := $(VENV)/.stamp-requirements
PACKAGE      := $(VENV)/.stamp-package
HOROVOD      := $(VENV)/.stamp-horovod

KERNEL_SOURCES  := $(wildcard csrc/*.c csrc/*.h) hvd_lhc/_build_kernel.py
PACKAGE_SOURCES := setup.py pyproject.toml $(KERNEL_SOURCES)
RECIPE_SOURCES  := hvd_lhc/_installer/recipe.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test lint test-unit test-c test-parallel setup kernel wheel sdist clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: setup ## train with and without compression under horovodrun, and compare
	$(PY) examples/demo.py

test: lint test-unit test-c test-parallel ## everything below that begins with lint or test
	@echo "make test: all passed"

lint: $(PACKAGE) ## ruff, and mypy (strict) on hvd_lhc/
	$(PY) -m ruff check .
	$(PY) -m mypy

test-unit: $(PACKAGE) ## tests that need no Horovod
	$(PY) -m pytest tests/unit $(PYTEST_ARGS)

test-c: $(MACHINE) ## the kernel under address and undefined-behaviour sanitizers
	PYTHON="$(PYTHON)" sh tests/c/run.sh

test-parallel: setup ## tests under horovodrun, with two ranks and more
	$(PY) -m pytest tests/parallel $(PYTEST_ARGS)

setup: $(PACKAGE) $(HOROVOD) ## .venv/ with the package and Horovod in it

kernel: $(PACKAGE) ## compile csrc/ if it has changed

wheel: $(REQUIREMENTS) ## dist/*.whl
	$(PIP) wheel . --no-deps --no-build-isolation --wheel-dir dist

sdist: $(REQUIREMENTS) ## dist/*.tar.gz
	$(PY) -c "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"

clean: ## remove what was built, but not .venv/
	rm -rf build dist *.egg-info hvd_lhc/_lhc_kernel.c hvd_lhc/_lhc_kernel*.so csrc/*.o
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis $(PACKAGE)
	find hvd_lhc tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv/ as well
	rm -rf $(VENV)

# What only the operating system can provide, each with the sentence that helps.
$(MACHINE):
	@command -v $(PYTHON) >/dev/null || { echo "No $(PYTHON) found. On Debian and Ubuntu: apt-get install python3 python3-dev python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { echo "$(PYTHON) is" `$(PYTHON) -V` "and the pinned frameworks need Python 3.11 to 3.13: give another one with make PYTHON=python3.11" >&2; exit 1; }
	@for compiler in gcc g++; do command -v $$compiler >/dev/null || { echo "No $$compiler found: a C and C++ compiler is needed. On Debian and Ubuntu: apt-get install build-essential" >&2; exit 1; }; done
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks the venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "$(PYTHON) lacks its headers (Python.h). On Debian and Ubuntu: apt-get install python3-dev" >&2; exit 1; }
	@mkdir -p $(VENV) && touch $@

$(REQUIREMENTS): requirements/dev.txt requirements/constraints.txt requirements/no-deps.txt | $(MACHINE)
	@test -x $(PY) && $(PY) -c 'import pip' 2>/dev/null || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(PIP_ARGS) -r requirements/dev.txt
	$(PIP) install $(PIP_ARGS) --no-deps -r requirements/no-deps.txt
	@touch $@

# An extension module of another name (another compiler call, another Python) would be found before the new one.
$(PACKAGE): $(PACKAGE_SOURCES) $(REQUIREMENTS)
	@rm -f hvd_lhc/_lhc_kernel*.so
	$(PIP) install $(PIP_ARGS) --no-build-isolation --no-deps --editable .
	@touch $@

$(HOROVOD): $(REQUIREMENTS) $(RECIPE_SOURCES) | $(PACKAGE)
	$(PY) -m hvd_lhc install-horovod $(HOROVOD_ARGS)
	@touch $@
