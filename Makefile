# Everything a newcomer types: `make run`, `make test`. Each sets up what it needs, in .venv, and nothing else.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
# Where the environment really is; .venv is a link to it. `flwr run .` visits every file in this folder before it packs
# the app, but follows no links: with the environment's 50,000 files in it, it would take ten seconds longer.
VENVS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fedkace_flwr/venvs
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# More workers than processors: the tests of real federations spend much of their time waiting.
WORKERS := $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))

.PHONY: help run test federations quick check bench docs setup clean

help:
	@echo 'make run          ten clients learn a stream of digits; prints a table and the path of a picture'
	@echo 'make quick        the fast tests'
	@echo 'make test         all tests but the next; on two cores in less than twenty minutes'
	@echo 'make federations  tests of SuperNodes, Ray clusters and killed parts, as real processes; another twelve minutes'
	@echo 'make check        lint, format, types, direction of imports, dead code, dependencies'
	@echo 'make bench        speed of local training, selection and the rest of a round'
	@echo 'make docs         the generated pages, and defaults in pyproject.toml, from the code'
	@echo 'make setup        the virtual environment alone'
	@echo 'make clean        remove the virtual environment, caches and build leftovers; results stay'

run: $(READY)
	$(BIN)/python -m experiments run quickstart

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not federation'

federations: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m federation

quick: $(READY)
	$(BIN)/python -m pytest -n auto -m 'not slow'

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture
	$(BIN)/deptry .

bench: $(READY)
	$(BIN)/python -m experiments bench

docs: $(READY)
	$(BIN)/python -m fedkace_flwr.config_docs

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(MAKE) --no-print-directory $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(READY)

$(VENV):
	@set -e; \
	place="$(VENVS)/$$(basename "$(CURDIR)")-$$(printf %s "$(CURDIR)" | cksum | cut -d ' ' -f 1)"; \
	mkdir -p "$(VENVS)"; \
	$(PYTHON) -m venv --clear "$$place"; \
	ln -sfn "$$place" $(VENV)

clean:
	if [ -L $(VENV) ]; then rm -rf "$$(readlink $(VENV))"; fi
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.fab
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
