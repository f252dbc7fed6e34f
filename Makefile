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

# Inputs for each parser that `make fuzz` tries.
RUNS ?= 1000000

.PHONY: help run quick test test-all check fuzz bench docs site notebooks lock lock-cpu release setup clean

help:
	@echo 'make run          ten clients learn a stream of digits; prints a table and the path of a picture'
	@echo 'make quick        the fast tests; two minutes on two cores'
	@echo 'make test         those and the slow ones; eight minutes on two cores'
	@echo 'make test-all     all tests, with SuperNodes, Ray clusters and killed parts as real processes; half an hour or more'
	@echo 'make check        lint, format, types, direction of imports, dead code, dependencies, documents'
	@echo 'make fuzz         a million inputs for each parser, by coverage (RUNS=1000 for fewer); takes hours'
	@echo 'make bench        speed of local training, selection and the rest of a round'
	@echo 'make docs         the generated pages, and defaults in pyproject.toml, from the code'
	@echo 'make site         the documentation as a site, in site/index.html'
	@echo 'make notebooks    run the notebooks in docs/notebooks/ and keep what they show'
	@echo 'make lock         deploy/requirements.txt: versions and hashes of all that a deployment installs'
	@echo 'make lock-cpu     deploy/requirements-cpu.txt: the same with PyTorch for CPUs, from its own index'
	@echo 'make release      wheel, sdist, bill of materials and checksums in dist/, checked'
	@echo 'make setup        the virtual environment alone'
	@echo 'make clean        remove the virtual environment, caches and build leftovers; results stay'

run: $(READY)
	$(BIN)/python -m experiments run quickstart

quick: $(READY)
	$(BIN)/python -m pytest -n auto -m 'not slow and not exhaustive'

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not federation and not exhaustive'

test-all: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture
	$(BIN)/deptry .
	$(MKDOCS) --quiet --site-dir $$(mktemp -d)/site

fuzz: $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[fuzz]'
	for parser in $$($(BIN)/python tests/fuzz/coverage_guided.py); do \
	  $(BIN)/python tests/fuzz/coverage_guided.py $$parser -runs=$(RUNS) -max_len=4000 || exit 1; \
	done

bench: $(READY)
	$(BIN)/python -m experiments bench

docs: $(READY)
	$(BIN)/python -m fedkace_flwr.config_docs
	$(BIN)/python -m fedkace_flwr.experiments.report.quoted REPRODUCIBILITY.md docs/fedframe.md docs/data.md docs/methods.md

# Material for MkDocs announces its successor at every build.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
site: $(READY)
	$(MKDOCS) --site-dir site

notebooks: $(READY)
	$(BIN)/python docs/site/notebooks.py

LOCK := $(BIN)/uv pip compile pyproject.toml deploy/requirements.in --extra serve --generate-hashes --quiet \
  --universal --python-version 3.11
lock: $(READY)
	$(LOCK) --custom-compile-command 'make lock' --output-file deploy/requirements.txt

lock-cpu: $(READY)
	$(LOCK) --torch-backend cpu --custom-compile-command 'make lock-cpu' --output-file deploy/requirements-cpu.txt

release: $(READY)
	$(BIN)/python deploy/release.py dist

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
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.fab
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
