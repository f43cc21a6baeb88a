# `make demo` and `make test` need nothing but Python 3.11+; both set up .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RAY    := .venv-ray
STAMP  := $(VENV)/.installed
DEMO   := runs/demo

.DEFAULT_GOAL := help
.PHONY: help demo test test-ray chaos check format bench stubs clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("edl_torch needs Python 3.11 or newer, %s is %d.%d: make PYTHON=python3.12 …" \
		% ((sys.executable,) + sys.version_info[:2]) if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## train the COCO captions example on generated scenes; ends with a picture
	$(BIN)/python examples/coco/train.py --demo --output $(DEMO)

test: $(STAMP)  ## all tests
	$(BIN)/python -m pytest -q

test-ray: $(RAY)/.installed  ## jobs on a local Ray cluster whose workers and master are killed; own environment
	$(RAY)/bin/python -m pytest -q tests/on_ray

$(RAY)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]'
	@touch $@

chaos: $(STAMP)  ## real jobs under fire: 200 kills of trainers, 50 of the master (six minutes)
	$(BIN)/python tests/chaos/chaos_run.py --keep runs/chaos

check: $(STAMP)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## put the code into form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## the benchmarks, each with a table and JSON under runs/
	@mkdir -p runs
	$(BIN)/python benchmarks/loader.py --json runs/loader.json
	$(BIN)/python benchmarks/dispatch.py --json runs/dispatch.json
	$(BIN)/python benchmarks/recovery.py --json runs/recovery.json
	$(BIN)/python benchmarks/scale.py --json runs/scale.json
	$(BIN)/python benchmarks/synchronous.py --json runs/synchronous.json

stubs: $(STAMP)  ## generate the protobuf stubs again
	$(BIN)/python -m edl_torch.rpc.generate

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) $(RAY) runs build dist .mypy_cache .ruff_cache .hypothesis
