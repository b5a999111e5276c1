# Every target sets up .venv when it is missing. `make` alone lists them.
PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
DEMO   := build/smollm2.infc

# A machine with a GPU may have nothing to download from: a Python that is named is used with what it has, and none is set up.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)),$(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint bench gpu-check coverage

help:           ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

setup: .venv/.ready   ## a Python environment with the pinned packages, in .venv

.venv/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "setup: making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	@echo "setup: installing the pinned packages (PyTorch for the CPU among them; a minute or two the first time)"
	@$(PIP) install "pip>=25.1,<26.2"
	@$(PIP) install --constraint constraints.txt torch==2.13.0
	@$(PIP) install --constraint constraints.txt --editable ".[cuda,gguf,gpu,hf]" --group dev
	@touch $@

demo: setup     ## compile SmolLM2-135M for this CPU, verify it, ask it a question
	@mkdir -p $(dir $(DEMO))
	@$(BIN)/infc compile smollm2 --force --output $(DEMO)
	@$(BIN)/infc verify $(DEMO)
	@echo
	$(BIN)/infc run $(DEMO) --chat --prompt "What is the capital of France?"

test: setup     ## the tests that take minutes together, on every core (at most four)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow"

test-slow: setup   ## the tests that take minutes each
	@$(BIN)/python -m pytest -m slow

lint: setup     ## ruff and basedpyright
	@$(BIN)/ruff check .
	@$(BIN)/basedpyright

bench: setup    ## infc beside its peers on this machine, in an environment of their own (.venv-peers; ten minutes to build)
	@$(BIN)/python benchmarks/peers.py --output benchmarks/results

coverage: setup ## lines that `make test` runs
	@$(BIN)/coverage run -m pytest -m "not slow"
	@$(BIN)/coverage report --skip-covered --sort=cover

gpu-check:      ## kernels, programs and speed on an NVIDIA GPU, nine minutes; PYTHON=python3 takes that one as it is, ARGS=--dry-run needs no GPU
	@$(GPU_PYTHON) -c "import infc" 2>/dev/null || $(GPU_PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@$(GPU_PYTHON) benchmarks/gpu_check.py $(ARGS)
