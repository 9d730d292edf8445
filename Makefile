# make run    a virtual environment, the installation, and `harness run --impl triton` on what this machine has
# make test   the same environment, the linters and the tests
#
# PYTHON=python3.12 make run    another interpreter
# VENV=/some/where make run     another place for the environment

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run test clean

run: $(VENV)/installed
	$(BIN)/harness run --impl triton

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 -q

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1): make run PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[nvml,test]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
