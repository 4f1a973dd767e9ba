# Everything that a newcomer types. Each target installs what it needs into .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# CPU machines must not pull the CUDA build of torch: the constraints file decides.
CONSTRAINTS ?= $(if $(shell command -v nvidia-smi 2>/dev/null),constraints/gpu.txt,constraints/cpu.txt)
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Images that switch bytecode off would have every process of a test run compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

# Tests run in up to four processes, of one engine thread each: two for each core, because many wait for servers and disks.
WORKERS = -n $(shell $(PYTHON) -c 'import os; print(min(4, 2 * (os.cpu_count() or 1)))') --dist loadfile

# Tests write and sync many small files. In memory that takes a fifth less time; on a disk, and in slow tests, all works alike.
IN_MEMORY = $(shell $(PYTHON) -c 'import os; s = os.statvfs("/dev/shm"); print("/dev/shm" if s.f_bavail * s.f_frsize > 8 << 30 and not s.f_flag & os.ST_NOEXEC else "")' 2>/dev/null)
TEMP = $(if $(IN_MEMORY),PYTEST_DEBUG_TEMPROOT=$(IN_MEMORY))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-slow check format bench docs map lock release pretrain clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.local: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	@echo "installing mint into $(VENV) (about a minute the first time)"
	$(PIP) -c $(CONSTRAINTS) -e '.[local]'
	@touch $@

$(VENV)/.dev: $(VENV)/.local
	$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(BIN)/python pyproject.toml
	$(PIP) -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

setup: $(VENV)/.dev  ## install mint and its development tools into .venv

demo: $(VENV)/.local  ## a language model learns arithmetic by RL, here, now
	$(BIN)/mint demo math

test: $(VENV)/.dev  ## the whole suite but the slow marks (about 10 minutes on 2 cores)
	$(TEMP) $(BIN)/python -m pytest $(WORKERS) -m "not slow"

test-fast: $(VENV)/.dev  ## what to run while editing (under 90 seconds)
	$(TEMP) $(BIN)/python -m pytest $(WORKERS) -m "not slow and not learns and not restarts" -x tests/service tests/client tests/rl tests/test_architecture.py tests/test_public_names.py tests/test_checklist.py

test-slow: $(VENV)/.dev  ## everything, the long and the registry-bound included
	$(BIN)/python -m pytest

check: $(VENV)/.dev  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ty check

format: $(VENV)/.dev  ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.local  ## mint against TRL, in turns, in one run
	$(BIN)/python -m benchmarks grpo --peer trl --json

docs: $(VENV)/.docs  ## build the documentation site into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

map:             ## print every file with the first sentence of its docstring; OUTPUT=FILE writes it there
	@$(PYTHON) scripts/code_map.py $(if $(OUTPUT),--output $(OUTPUT))

lock: $(BIN)/python  ## pin what a deployment installs, with hashes, into constraints/deployment.txt (asks the package index)
	$(PIP) uv
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
		--constraint constraints/cpu.txt --extra local --extra structured --extra tasks --extra trackers \
		--custom-compile-command "make lock" --output-file constraints/deployment.txt

release: $(BIN)/python  ## build and check sdist, wheel, SBOM and notes in dist/; uploads nothing (REPOSITORY_URL=https://…)
	$(PIP) -c $(CONSTRAINTS) 'build>=1.3,<2' 'cyclonedx-bom>=7.2,<8' 'twine>=6.2,<8'
	REPOSITORY_URL=$(REPOSITORY_URL) $(BIN)/python scripts/release.py

pretrain: $(VENV)/.local  ## make the bundled model again, from its seed (an hour on 2 cores)
	$(BIN)/python -m scripts.tiny.pretrain --tokens 17000000 --seed 0 --output src/mint/models/tiny

clean:           ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist site
