# Every target sets up what it needs by itself: a virtual environment in .venv, nothing outside it but caches.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
OPENHANDS := .venv-openhands
PYTHON312 ?= python3.12

.PHONY: demo test test-frameworks test-openhands soak check bench quality gpu clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.demo  ## set up and run the demo: an agent's observations are dropped, nothing is prefilled twice
	$(BIN)/akv demo

test: $(VENV)/.dev  ## set up and run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test-frameworks: $(FRAMEWORKS)/.ready  ## agent frameworks as they are, against a server (their own environment; ~1 GB)
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest tests/frameworks
	$(FRAMEWORKS)/bin/mypy --cache-dir $(FRAMEWORKS)/.mypy_cache akv_sdk/integrations examples/integrations

test-openhands: $(OPENHANDS)/.ready  ## the same for OpenHands' SDK, which needs Python 3.12 and goes with none of the others
	OMP_NUM_THREADS=1 $(OPENHANDS)/bin/python -m pytest tests/frameworks/test_openhands.py

soak: $(VENV)/.dev  ## the long form of the random tests: 100,000 steps of the cache, 60 kills, ten minutes of load
	AKV_SOAK=1 $(BIN)/python -m pytest tests/test_cache.py tests/test_journal.py tests/test_load.py

check: $(VENV)/.dev  ## types and lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev  ## timings as ratios within one run (keep the machine quiet)
	$(BIN)/python -m tests.perf.bench

quality: $(VENV)/.dev  ## what dropping costs the model on real trajectories, beside deleting, truncation and a summary
	$(BIN)/python -m tests.perf.quality

# What `make gpu` needs, and a torch that sees a GPU: a Python that has all that is taken as it is, with nothing installed.
SEES_A_GPU := import sys, pytest, rich, safetensors, tokenizers, transformers, triton, torch; \
	sys.exit(not torch.cuda.is_available())

gpu:  ## on a GPU: the kernel tests for real, then timings, by $(PYTHON)'s own torch if it sees a GPU, else by pip's
	if $(PYTHON) -c '$(SEES_A_GPU)' 2>/dev/null; \
	then PYTHONPATH=kernels $(PYTHON) -m tests.perf.gpu; \
	else $(MAKE) $(VENV)/.dev && $(BIN)/python -m tests.perf.gpu; \
	fi

%/.python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("AKV needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install -q --upgrade pip
	touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install -q -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@ $(VENV)/.demo

$(FRAMEWORKS)/.ready: $(FRAMEWORKS)/.python pyproject.toml
	$(FRAMEWORKS)/bin/python -m pip install -q -e '.[frameworks]'
	touch $@

$(OPENHANDS)/.python: PYTHON = $(PYTHON312)

$(OPENHANDS)/.ready: $(OPENHANDS)/.python pyproject.toml
	$(OPENHANDS)/bin/python -m pip install -q -e '.[openhands]'
	touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(OPENHANDS) .pytest_cache .mypy_cache .ruff_cache
