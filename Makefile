# Every target works as the first command after a clone: it builds .venv where that is missing or out of date.
# Wanted beforehand: make, Python 3.11 or newer with venv, and a way to PyPI.

PYTHON ?= python3
BENCH ?= deploy prepare graph numerics observers qat_step scale
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist worksteal

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

export PIP_ROOT_USER_ACTION := ignore
export VIRTUAL_ENV := $(CURDIR)/$(VENV)

# $(call check,what,command): one line when the command is content, all it said when it is not.
check = @printf '  %-22s' '$(1)'; if out=$$($(2) 2>&1); then echo ok; else echo FAILED; printf '%s\n' "$$out"; exit 1; fi

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## Take a model from float to a verified INT8 file
	@$(BIN)/python -m bitwright.demo

test: lint ## Lint, then run the tests (PYTEST_ARGS="-k name" for some)
	@echo "Testing"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP) ## Check style, formatting, types, layers and spelling
	@echo "Linting"
	$(call check,ruff check,$(BIN)/ruff check .)
	$(call check,ruff format,$(BIN)/ruff format --check .)
	$(call check,pyrefly check,$(BIN)/pyrefly check)
	$(call check,lint-imports,$(BIN)/lint-imports --no-logo)
	$(call check,codespell,$(BIN)/codespell)

bench: $(STAMP) ## Run the benchmarks (BENCH=deploy or BENCH=prepare for one)
	@for name in $(BENCH); do echo "Benchmark: $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

clean: ## Remove caches and build output; .venv stays
	@rm -rf build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "Removed caches and build output"

# torch goes first and by its exact version: anything looser may fetch another release with gigabytes of CUDA
# packages. The stamp is written last, so an interrupted installation is taken up again by the next make.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Bitwright needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 \
		|| { echo "Creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing torch"
	@$(PIP) -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@echo "Installing bitwright with all extras"
	@$(PIP) -c constraints.txt -e ".[all,dev]"
	@touch $@
