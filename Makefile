# make run    a virtual environment, the installation, and `harness run --impl triton` on what this machine has
# make test   the same environment, the linters and the tests
# make clean  removes the environment
#
# make run PYTHON=python3.12    another interpreter; an environment of another one is made anew
# make run VENV=/some/where     another place for the environment

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

ifneq ($(words $(VENV)),1)
$(error VENV is "$(VENV)"; make takes one path without spaces)
endif

# What tells interpreters apart. The stamp keeps it, so that a PYTHON= given later takes effect.
IDENTITY := import platform, sys; print(sys.base_prefix, platform.python_version())
FOUND := $(shell cat $(VENV)/installed 2>/dev/null)
WANTED := $(FOUND)
ifneq ($(origin PYTHON),file)
WANTED := $(shell "$(PYTHON)" -c '$(IDENTITY)' 2>/dev/null)
endif
ifeq ($(FOUND),)
CREATE := "$(PYTHON)" -m venv $(VENV)
else ifneq ($(FOUND),$(WANTED))
CREATE := "$(PYTHON)" -m venv --clear $(VENV)
$(VENV)/installed: another-interpreter
endif
BASE := $(if $(CREATE),$(PYTHON),$(BIN)/python)

.PHONY: run test clean help another-interpreter

run: $(VENV)/installed
	$(BIN)/harness run --impl triton

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 -q

# The one warning that is hidden: setuptools says of every editable installation that folders of the working directory
# may come before packages of the same name. Here they are the same folders.
$(VENV)/installed: pyproject.toml constraints.txt
	@"$(BASE)" -c '' 2>/dev/null || \
		{ echo "$(BASE) does not run here: PYTHON= takes the name or path of a Python of 3.11 or later"; exit 1; }
	@"$(BASE)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed, $(BASE) is $$("$(BASE)" -V): PYTHON= takes another one"; exit 1; }
	$(CREATE)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS='ignore:Editable installation' \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[nvml,test]'
	@for language in tilelang cute; do \
		PYTHONWARNINGS='ignore:Editable installation' \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$$language]" || \
		echo "$$language could not be installed: its port is left out, and the tests that need it skip"; done
	@$(BIN)/python -c '$(IDENTITY)' > $@

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

clean:
	rm -rf $(VENV) build *.egg-info
