# Everything sets itself up: `make test` and `make demo` need Python 3.11+ and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test lint types pytest demo bench clean

test: lint types pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

pytest: $(READY)
	$(BIN)/pytest

demo: $(READY)
	$(BIN)/pinscher prune --overwrite

bench: $(READY)
	$(BIN)/python benchmarks/threshold.py --output benchmarks/results/threshold.txt
	$(BIN)/python benchmarks/step_overhead.py --output benchmarks/results/step_overhead.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
