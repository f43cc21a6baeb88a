# `make demo` and `make test` need nothing but Python 3.11+; both set up .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := runs/demo
FUZZ_S := 60
WORKERS := 3
# Rooms of the package, whose tests can be run alone: make test-core.
ROOMS := audit checking client core data elasticdl examples integrations master readers rpc system trainer
FRAMEWORKS := ray tensorflow lightning accelerate transformers deepspeed torchtitan torchft

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu test-repository $(ROOMS:%=test-%) $(FRAMEWORKS:%=test-%) docs coverage chaos simulate fuzz check format bench stubs clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("edl_torch needs Python 3.11 or newer, %s is %d.%d: make PYTHON=python3.12 …" \
		% ((sys.executable,) + sys.version_info[:2]) if sys.version_info < (3, 11) else 0)'
	@echo "installing into $(VENV), once, which takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## train on two ranks, kill one and the master, and prove that each record counts once; ARGS=--quiet kills nobody
	$(BIN)/python examples/coco/demo.py --output $(DEMO) $(ARGS)

# pytest keeps the tests that it has compiled, even where the environment forbids Python to: each worker would compile
# all of them, for 5 s.
test test-all $(ROOMS:%=test-%): export PYTHONDONTWRITEBYTECODE =

# A file's tests stay together, in the order of their folders: those of many processes first, small ones at the end.
test: $(STAMP)  ## every promise once; the slowest tests are named at the end; WORKERS=3 at a time
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

test-core:  ## the tests of one room of the package, with its slowest; so are: test-data test-readers test-trainer …
$(ROOMS:%=test-%): test-%: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --durations=10 tests/unit/$* $(ARGS)

test-repository: $(STAMP)  ## what holds for all files: names, doors, pages, options, the site
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile tests/unit/test_*.py $(ARGS)

test-all: $(STAMP)  ## further cases too (marked `long`): more start methods, seeds, ways to die
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=40 -m ''

docs: $(STAMP)  ## the documentation site, in runs/docs; a warning is an error
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --doctree-dir runs/doctrees docs runs/docs
	@echo "runs/docs/index.html"

coverage: $(STAMP)  ## the tests, and which lines of the package they ran in their own processes
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt pytest-cov
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --cov edl_torch --cov-report term:skip-covered

# Each framework has an environment of its own: they want other packages, and are large. torchtitan's `datasets` wants
# an older fsspec than the constraints have; DeepSpeed's kernels are not for a processor.
.venv-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	grep -v '$(if $(filter torchtitan,$*),^fsspec,^$$)' constraints.txt > .venv-$*/constraints.txt
	DS_BUILD_OPS=0 .venv-$*/bin/pip install --quiet --disable-pip-version-check -c .venv-$*/constraints.txt -e '.[$*]' \
		pytest pytest-timeout
	@touch $@

# The torch that $(PYTHON) has fits the machine's driver, so what is there is used, and only the rest is installed. Without
# a network pip takes that from a folder: make test-gpu PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels
.venv-gpu/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	$(PYTHON) -c 'import site; print(*map("import site; site.addsitedir({!r})".format, site.getsitepackages()), sep="\n")' \
		> $$(.venv-gpu/bin/python -c 'import site; print(site.getsitepackages()[0])')/machine.pth
	.venv-gpu/bin/pip install --quiet --disable-pip-version-check -e . pytest pytest-timeout
	@touch $@

test-gpu: .venv-gpu/.installed  ## what needs a GPU, with the torch of PYTHON=python3; without one it skips
	.venv-gpu/bin/python -m pytest -q --durations=10 tests/on_gpu \
		tests/integration/test_process_group.py::test_so_they_are_over_nccl $(ARGS)

# ARGS="-m ''" runs their further cases too: jobs that are killed ten times.
test-ray: .venv-ray/.installed  ## jobs on a local Ray cluster whose workers and master are killed
	.venv-ray/bin/python -m pytest -q tests/on_ray $(ARGS)

test-tensorflow: .venv-tensorflow/.installed  ## TensorFlow's corner
	.venv-tensorflow/bin/python -m pytest -q tests/with_tensorflow $(ARGS)

test-lightning: .venv-lightning/.installed  ## jobs of Lightning's Trainer, killed and resumed
	.venv-lightning/bin/python -m pytest -q tests/with_lightning $(ARGS)

test-accelerate: .venv-accelerate/.installed  ## jobs with Accelerate, killed and resumed
	.venv-accelerate/bin/python -m pytest -q tests/with_accelerate $(ARGS)

test-transformers: .venv-transformers/.installed  ## jobs of a Transformers Trainer, killed and resumed
	.venv-transformers/bin/python -m pytest -q tests/with_transformers $(ARGS)

test-deepspeed: .venv-deepspeed/.installed  ## jobs with a DeepSpeed engine, killed and resumed
	.venv-deepspeed/bin/python -m pytest -q tests/with_deepspeed $(ARGS)

test-torchtitan: .venv-torchtitan/.installed  ## torchtitan's trainer on the CPU, killed and resumed
	.venv-torchtitan/bin/python -m pytest -q tests/with_torchtitan $(ARGS)

test-torchft: .venv-torchft/.installed  ## replicas under torchft, whose commits fail and that are killed
	.venv-torchft/bin/python -m pytest -q tests/with_torchft $(ARGS)

chaos: $(STAMP)  ## real jobs under fire: 200 kills of trainers, 50 of the master; 200 notices; jobs that restore
	$(BIN)/python tests/chaos/chaos_run.py --keep runs/chaos
	$(BIN)/python tests/chaos/notices_run.py
	$(BIN)/python -m pytest -q -m long tests/integration tests/chaos
	$(BIN)/python -m pytest -q tests/unit/examples/test_coco_killed.py tests/integration/test_torchrun.py

simulate: $(STAMP)  ## the same in simulated time: small jobs, a thousand trainers, then 10,000 with a million shards
	$(BIN)/python tests/simulation/run.py
	$(BIN)/python tests/simulation/run.py --models 40 --jobs 2
	$(BIN)/python -m pytest -q -m long tests/simulation
	$(BIN)/python tests/simulation/run.py --trainers 10000 --shards 1000000 --seed 3

fuzz: $(STAMP)  ## the master's calls, tokens and journal rows under atheris, FUZZ_S=60 seconds each
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	@for target in calls state; do \
		mkdir -p runs/fuzz/$$target/corpus && $(BIN)/python tests/fuzz/fuzz.py $$target -max_total_time=$(FUZZ_S) \
			-timeout=60 -len_control=0 -max_len=2048 -artifact_prefix=runs/fuzz/$$target/ runs/fuzz/$$target/corpus || exit 1; \
	done

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
	$(BIN)/python benchmarks/makespan.py --json runs/makespan.json
	$(BIN)/python benchmarks/scale.py --json runs/scale.json
	$(BIN)/python benchmarks/synchronous.py --json runs/synchronous.json
	$(BIN)/python benchmarks/shuffle.py --json runs/shuffle.json
	$(BIN)/python benchmarks/readers.py --json runs/readers.json

# The oldest tools that the package supports: see tools/make_stubs.py.
STUBS := .venv-stubs
$(STUBS)/.installed: tools/make_stubs.py
	$(PYTHON) -m venv $(STUBS)
	$(STUBS)/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.71.0
	@touch $@

stubs: $(STUBS)/.installed  ## generate the protobuf stubs again, with tools in an environment of their own
	$(STUBS)/bin/python tools/make_stubs.py

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) .venv-* runs build dist .mypy_cache .ruff_cache .hypothesis
