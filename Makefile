# `make demo` and `make test` need Python 3.11 or newer and nothing else: they make .venv by themselves.
PYTHON ?= python3
BIN ?= .venv/bin
READY ?= .venv/ready
FAULT ?= spike
WORKERS ?= 2

.PHONY: demo test slow check fix docs clean

demo: $(READY)
	@$(BIN)/sentinel demo --fault $(FAULT)

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --durations 12 -m "not slow"

slow: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 12 -m slow

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	rm -rf build/types && $(BIN)/python -m pip install -q --no-deps --target build/types .
	cd build/types && MYPYPATH=. $(abspath $(BIN))/mypy --config-file ../../pyproject.toml -p sentinel

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sentinel needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11 ...")'
	@echo "Setting up .venv: about a minute, once."
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@touch $@

clean:
	rm -rf .venv build dist demo-output *.egg-info
