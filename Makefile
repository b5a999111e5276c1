# Every target sets up .venv when it is missing. `make` alone lists them.
PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
DEMO   := build/smollm2.infc

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

gpu-check: setup   ## numerics and speed on an NVIDIA GPU
	@echo "gpu-check: infc has no GPU backend yet, so there is nothing to check" >&2; exit 2
