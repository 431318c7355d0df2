# Two commands: `make demo` sets everything up in .venv and runs the main job; `make test` sets up the same way and tests.
#   TORCH_INDEX=URL  where to take torch from     CUDA=13|12|none  which build of it
#   PYTEST_ARGS="-k relay"  more for pytest       WORKERS=N        test files at a time, by default 3
SHELL := /bin/bash
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-slow chaos gpu-check bench-gpu fmt lint apex wheel clean

help:
	@echo 'make demo        set up .venv and run the main job: laminar train experiment=demo'
	@echo 'make test        set up .venv and run the tests (those marked slow are left out)'
	@echo 'make test-fast   policies, messages, configuration and the scripted controller: what to run while you write'
	@echo 'make test-slow   the tests marked slow: long runs, process deaths, a real two-node Slurm'
	@echo 'make chaos       30 minutes of random faults upon a run on a real Slurm of four nodes, then the audit; as root'
	@echo '                 (CHAOS_ARGS, for example "--seconds 300 --seed 7 --json chaos.json")'
	@echo 'make gpu-check   on a GPU: all of the system in at most 25 minutes, stage by stage; a table with verdicts and cures'
	@echo '                 (GPU_CHECK_ARGS, for example "--json gpu.json"; a second call goes on where the first one ended)'
	@echo 'make bench-gpu   on a GPU: the kernels against a plain copy and torch.compile (BENCH_ARGS), KV gather and scatter (KV_BENCH_ARGS),'
	@echo "                 a 7B's weights to a relay that dies (HAND_OVER_ARGS), KV moves between two 7B engines (KV_ENGINES_ARGS);"
	@echo '                 for example BENCH_ARGS="--json kernels.json"'
	@echo 'make fmt         write all files in the one format, and mend what ruff can mend'
	@echo 'make lint        ruff, its format, mypy, and import-linter: the floors and doors of the rooms'
	@echo 'make setup       set up .venv only; a second call installs nothing'
	@echo 'make wheel       build dist/: the wheel, and the pins and hashes of all that it runs with (docs/installing.md)'
	@echo "make apex        build NVIDIA's apex into .venv (machines with CUDA's compiler)"
	@echo 'make clean       remove .venv and caches; runs are kept'

setup:
	@bash requirements/setup.sh

wheel: setup
	@bash requirements/wheel.sh

demo: setup
	@echo '$$ laminar train experiment=demo'
	@$(BIN)/laminar train experiment=demo

# One thread per process: the tests start many of them. Tests marked gpu run where there is one.
test test-fast test-slow: export OMP_NUM_THREADS := 1
# Bytecode is kept, whatever the environment says: else each worker compiles all tests anew, 10 s of a processor.
test test-fast test-slow: export PYTHONDONTWRITEBYTECODE :=
# Whole files are handed to the workers (tests/conftest.py); a third of a test is waiting, so two cores have three.
WORKERS ?= 3
test test-fast test-slow: SIDE_BY_SIDE = $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --no-loadscope-reorder)
test test-slow: GPU = $(shell nvidia-smi -L >/dev/null 2>&1 || echo ' and not gpu')

test: setup
	@$(BIN)/python -m pytest -m 'not slow$(GPU)' $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# Tests that import the script play messages to the real controller, without a process.
FAST = tests/policies tests/config/test_config.py tests/config/test_refusals.py tests/store/payload/test_layout.py \
	$(shell grep -rl --include='test_*.py' 'helpers.control.script' tests/moves)
test-fast: setup
	@$(BIN)/python -m pytest -m 'not slow and not gpu' $(SIDE_BY_SIDE) $(PYTEST_ARGS) $(FAST)

test-slow: setup
	@$(BIN)/python -m pytest -m 'slow$(GPU)' $(SIDE_BY_SIDE) $(PYTEST_ARGS)

chaos: setup
	@$(BIN)/python bench/chaos.py $(CHAOS_ARGS)

gpu-check: setup
	@$(BIN)/python bench/gpu_check $(GPU_CHECK_ARGS)

bench-gpu: setup
	@$(BIN)/python bench/kernels.py $(BENCH_ARGS)
	@$(BIN)/python bench/kv_device.py $(KV_BENCH_ARGS)
	@$(BIN)/python bench/hand_over.py $(HAND_OVER_ARGS)
	@$(BIN)/python bench/kv_engines.py --model 7b --lengths 1024,8192 $(KV_ENGINES_ARGS)

fmt: setup
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

lint: setup
	@$(BIN)/ruff check --output-format concise .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

apex: setup
	@bash requirements/apex.sh

clean:
	@rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
