# Two commands do: `make demo` runs a small search on this machine, `make test` checks the tree.
# Both set up .venv first, once; pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) choose where packages,
# and with them the CPU, CUDA or ROCm build of torch, come from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
IMPORTED := $(VENV)/.imported
LOWEST := .venv-lowest
AUDIT := .venv-audit
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

DEMO_DATA := .wattune/data/demo
GPU_DEMO := $(if $(shell nvidia-smi -L 2>/dev/null),$(wildcard examples/tiny_gpu.yaml))
DEMO_SPEC := $(or $(GPU_DEMO),examples/tiny_cpu.yaml)

PAGES := README.md CONTRIBUTING.md CHANGELOG.md telemetry/grafana.json \
	$(wildcard docs/*.md docs/*.svg docs/*.css docs/*/*.md docs/*/*/* benchmarks/*/README.md)

# Byte code that is not kept is made anew by each of the many processes that tests and searches start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-lowest lint docs audit bench clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST)

setup: $(STAMP) $(DEMO_DATA).idx ## Install everything, pinned, into .venv, and prepare tokens for the examples

# uv takes a third of pip's time. It looks for packages where pip is set to, by its files or, before these, its variables,
# and chooses among them as pip does; where it does not come through, pip does.
define install
set_to() { $(BIN)/python -m pip config list | sort -r | sed -n "s/.*\.$$1='\(.*\)'/\1/p" | tail -n 1; }; \
index=$$(set_to index-url); \
UV_DEFAULT_INDEX="$${index:-https://pypi.org/simple}" UV_INDEX="$$(set_to extra-index-url)" \
UV_FIND_LINKS="$$(set_to find-links | tr ' ' ,)" UV_INDEX_STRATEGY=unsafe-best-match \
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt $(1) || \
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt $(1)
endef

# DeepSpeed's build looks at the torch already there, and builds no extension ahead of time. Byte code is made by the
# first import of what is imported at all.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install --quiet uv
	@$(call install,torch setuptools)
	@export DS_BUILD_OPS=0; $(call install,-e '.[dev]')
	touch $@

demo: setup ## Run a small search here
	$(BIN)/wattune run $(DEMO_SPEC)

# Text found on any machine: the sources of Python's own standard library.
$(DEMO_DATA).idx: | $(STAMP)
	$(BIN)/wattune data --out $(DEMO_DATA) "$$($(BIN)/python -c 'import os; print(os.path.dirname(os.__file__))')"/*.py

# Byte code of what tests import, once: each of the workers that follow would make it for itself.
$(IMPORTED): $(STAMP)
	-@$(BIN)/python -m pytest --collect-only --quiet > /dev/null
	touch $@

# Tests wait for processes for as long as they compute: four at a time keep two cores busy. What fails beside other
# tests runs once more, alone: both outcomes are printed, and the second one counts.
test: setup $(IMPORTED) ## Run the tests
	$(BIN)/python -m pytest -n 4 --dist loadgroup || $(BIN)/python -m pytest -n 1 --dist loadgroup --last-failed

# A second environment. torch is the pinned one, of which there is surely a build: TORCH=2.11.0 takes the lowest too.
test-lowest: $(STAMP) ## Run the tests with the lowest versions that pyproject.toml allows
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	mkdir -p build
	$(BIN)/python tests/lowest.py torch==$(TORCH) > build/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet -c build/lowest.txt torch setuptools
	DS_BUILD_OPS=0 $(LOWEST)/bin/python -m pip install --quiet -c build/lowest.txt -e '.[dev]'
	$(LOWEST)/bin/python -m pytest

lint: setup ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(STAMP) ## Write the tables of docs/spec.md anew, build the documentation into build/site, and check its links
	$(BIN)/python docs/tables.py
	rm -rf build/pages
	mkdir -p build/pages
	cp --parents $(PAGES) build/pages
	$(BIN)/mkdocs build --quiet --strict

# In an environment of its own: the project does without what it needs.
audit: $(STAMP) ## Ask whether pinned versions have known vulnerabilities that others fix; skipped where nobody answers
	-@test -x $(AUDIT)/bin/pip-audit || ($(BIN)/python -m venv $(AUDIT) && \
		$(AUDIT)/bin/python -m pip install --quiet --no-compile pip-audit)
	@$(BIN)/python tests/audit.py $(AUDIT)/bin/pip-audit

bench: setup ## Measure the figures under benchmarks/results
	$(BIN)/python -m benchmarks

clean: ## Remove .venv, caches and build output; searches under .wattune stay
	rm -rf $(VENV) $(LOWEST) $(AUDIT) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
