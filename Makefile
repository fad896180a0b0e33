# Every target sets up what it needs in $(VENV); a second run finds it done and starts at once.
#
#   make test PYTHON=python3.12                     another interpreter (run `make clean-venv` before changing it)
#   make test PYTEST_ARGS="-k schedule -x"          arguments for pytest
#   make test PYTEST_JOBS=0                         one process, for a debugger
#   make package PACKAGE_PYTHONS="python3.11 python3.12 python3.13"    the wheel in each of these
#
# torch goes in first and pinned: a looser request can fetch gigabytes of CUDA libraries. The build is
# whatever your pip configuration gives for the pin. To choose another, a CUDA one say, set
# TORCH_INSTALL_ARGS to what pip should install; the change is noticed and torch replaced. Export it in
# your shell to keep it, since the next plain `make` goes back to the default:
#
#   export TORCH_INSTALL_ARGS="torch==2.13.0 --index-url <the index of the build you want>"

PYTHON ?= python3
VENV ?= .venv
TORCH_INSTALL_ARGS ?= torch==2.13.0
PYTEST_JOBS ?= 2
PORT ?= 8000
PYTEST_ARGS ?=
# Which Pythons `make package` installs the wheel for; each takes a minute or two.
PACKAGE_PYTHONS ?= $(BIN)/python
# Threads of torch in each test process: more than one and the processes fight over the cores.
TEST_THREADS ?= 1

BIN := $(VENV)/bin
AS_ROOT := $(if $(filter-out 0,$(shell id -u)),sudo)
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
# Each process begins with a half of the tests in their order, so that most files set up once, and takes from the
# other when it is done: some slow tests take minutes.
# What Python compiles is kept, whatever the environment says: else every process of every run, and there are many,
# compiles the package anew, and the tests too, in which pytest rewrites what is asserted.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help test test-slow test-browser test-research results notebooks demo serve docs package check format clean clean-venv FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

test: $(VENV)/.test ## the tests, without the slow and the gpu ones
	@$(PYTEST) $(PYTEST_ARGS)

# pytest exits with 5 when it selects no test; that is no failure here, where all may be quick.
test-slow: $(VENV)/.test ## only the tests marked slow
	@$(PYTEST) -m slow --slow $(PYTEST_ARGS) || { \
		status=$$?; \
		if [ $$status -eq 5 ]; then echo "No slow tests to run."; else exit $$status; fi; }

test-browser: $(VENV)/.browser ## the tests of the server's page, in chromium
	@command -v chromium > /dev/null || { \
		echo "Installing chromium ..."; \
		$(AS_ROOT) apt-get update -qq && $(AS_ROOT) apt-get install -qq -y --no-install-recommends chromium; }
	@$(PYTEST) -m browser --browser tests/browser $(PYTEST_ARGS)

test-research: $(VENV)/.test ## the tests of what is in research/, the slow ones too
	@$(PYTEST) --slow research/tests $(PYTEST_ARGS)

results: $(VENV)/.core ## the pages of results and the README's plot, from research/results
	@$(BIN)/python -m research.evidence.document

notebooks: $(VENV)/.test ## run docs/notebooks, and save what they print and plot
	@OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python scripts/run_notebooks.py docs/notebooks/*.ipynb

demo: $(VENV)/.core ## the demonstration, `bd3lm demo`
	@$(BIN)/bd3lm demo

serve: $(VENV)/.serve ## the model in the box behind HTTP, with a page to see it write: 127.0.0.1, PORT=8000
	@$(BIN)/bd3lm serve --port $(PORT)

# Only what was read anew is sure to show all its warnings, and an API page changes with the code that it is about.
docs: $(VENV)/.docs ## the site, in build/site; warnings and broken links are errors
	@rm -rf build/site
	@OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -qEW --keep-going -b html -d build/doctrees docs build/site
	@$(BIN)/python scripts/check_site.py build/site

package: $(VENV)/.package ## the sdist and the wheel, in dist/; checks them, and installs and runs the wheel by itself
	@rm -rf dist
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/check_package.py dist --torch "$$TORCH_INSTALL_ARGS" \
		$(foreach python,$(PACKAGE_PYTHONS),--python $(python))

check: $(VENV)/.dev ## formatting, lint, types and import rules; runs no tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev ## rewrite the files in the project's format
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

clean: ## remove caches and build outputs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests research -type d -name __pycache__ -prune -exec rm -rf {} +

clean-venv: ## remove the virtual environment (after changing Python, or when it is broken)
	rm -rf $(VENV)

# --- set-up ----------------------------------------------------------------------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
		echo "bd3lm needs Python 3.11, 3.12 or 3.13, and PYTHON=$(PYTHON) is not one: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@echo "Making a virtual environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Rewritten only when TORCH_INSTALL_ARGS differs from what was installed, so that its date tells.
export TORCH_INSTALL_ARGS
$(VENV)/.torch-args: FORCE | $(VENV)/.made
	@test -x $(BIN)/python || { echo "$(VENV) is broken: run make clean-venv" >&2; exit 1; }
	@printf '%s\n' "$$TORCH_INSTALL_ARGS" | cmp -s - $@ || printf '%s\n' "$$TORCH_INSTALL_ARGS" > $@

# The stamp is itself a constraint: what comes after may not swap this torch for another.
$(VENV)/.torch: $(VENV)/.torch-args
	@echo "Installing $(TORCH_INSTALL_ARGS) (the first time takes about a minute) ..."
	@$(BIN)/python -m pip uninstall -qq -y torch
	@$(PIP_INSTALL) $(TORCH_INSTALL_ARGS)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

INSTALL_SELF = $(PIP_INSTALL) -c constraints.txt -c $(VENV)/.torch
SELF_INPUTS := $(VENV)/.torch pyproject.toml constraints.txt

$(VENV)/.core: $(SELF_INPUTS)
	@echo "Installing bd3lm and what it needs ..."
	@$(INSTALL_SELF) -e .
	@touch $@

$(VENV)/.serve: $(SELF_INPUTS)
	@echo "Installing bd3lm and what its server needs ..."
	@$(INSTALL_SELF) -e ".[serve]"
	@touch $(VENV)/.core $@

$(VENV)/.test: $(SELF_INPUTS)
	@echo "Installing bd3lm and what its tests need ..."
	@$(INSTALL_SELF) -e ".[test]"
	@touch $(VENV)/.core $@

$(VENV)/.browser: $(SELF_INPUTS)
	@echo "Installing bd3lm and what the tests of its page need ..."
	@$(INSTALL_SELF) -e ".[browser]"
	@touch $(VENV)/.core $(VENV)/.test $@

$(VENV)/.docs: $(SELF_INPUTS)
	@echo "Installing bd3lm and what makes its site ..."
	@$(INSTALL_SELF) -e ".[docs]"
	@touch $(VENV)/.core $@

$(VENV)/.package: $(SELF_INPUTS)
	@echo "Installing bd3lm and what packs it ..."
	@$(INSTALL_SELF) -e ".[package]"
	@touch $(VENV)/.core $@

$(VENV)/.dev: $(SELF_INPUTS)
	@echo "Installing bd3lm, what its tests need and the linters ..."
	@$(INSTALL_SELF) -e ".[dev]"
	@touch $(VENV)/.core $(VENV)/.test $@
