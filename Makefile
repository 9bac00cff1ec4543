# `make demo` and `make test` only need Python 3.11 or newer: they make .venv by themselves.
# WORKERS: two for a proof; three for fast tests, four for slow ones, also on two cores, as they wait for processes.
# SEED: selects the cases of tests marked `sampled`, and in CI an eighth of the slow tests. `make proof PART=cases` runs
# all cases, `make slow` all slow tests.
PYTHON ?= python3
BIN ?= .venv/bin
READY ?= .venv/ready
FAULT ?= spike
WORKERS ?=
SEED ?= 0
PART ?=
MINUTES ?= 30
FIRST ?= 0

# Otherwise every process that a test starts would compile all of the source again, and every worker all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow all-tests proof check fix docs site pictures clean

demo: $(READY)
	@$(BIN)/sentinel demo --fault $(FAULT)

PYTEST = $(BIN)/python -m pytest -n $(or $(WORKERS),$(1)) --dist worksteal --sample-seed $(SEED) --durations 12

test: $(READY)
	$(call PYTEST,3) -m "not slow"

slow: $(READY)
	$(call PYTEST,4) -m slow

# The tests as CI runs them, in one call: collected once, and waiting tests run beside computing ones.
all-tests: $(READY)
	$(call PYTEST,4) --slow-share 8

proof: $(READY)
	$(BIN)/python -m bench.proof $(PART) --minutes $(MINUTES) --workers $(or $(WORKERS),2) --first $(FIRST)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy -p sentinel
	rm -rf build/imports && mkdir -p build/imports && cp -rL sentinel build/imports # lint-imports follows no links
	cd build/imports && PYTHONPATH=. $(abspath $(BIN))/lint-imports --config ../../pyproject.toml --no-cache

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Everything that is generated: pages, tables, Prometheus' rules, dashboards. tests/docs/test_fresh.py checks that it is
# up to date.
docs: $(READY)
	$(BIN)/python -m tests.docs.generate

# docs/ as a site in build/site, with checked links and anchors.
site: $(READY)
	$(BIN)/mkdocs build --quiet

# The screenshots in docs/images. They need Chromium, and differ by a few pixels each time.
pictures: $(READY)
	WRITE_PICTURES=1 $(BIN)/python -m pytest tests/web/test_views.py tests/web/test_charts.py

.venv/ready: pyproject.toml setup.py constraints.txt hooks/measure/_onepass.c hooks/measure/_dlpack.h
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sentinel needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11 ...")'
	@echo "Setting up .venv: some three minutes, once."
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@touch $@

clean:
	rm -rf .venv build dist demo-output *.egg-info
