# make demo       trains two small networks on real data, exports, verifies and serves them
# make test       the tests that say whether it works here, in one environment
# make test-all   these, and by `make test-rest` everything else: kernels, sanitizers, emulators, runtimes, servers, docs, lint
# make check      lint, types and `make test`: before each commit
# make lint       lint and types
# make newest     `make test` and mypy with the newest version of every package
# make docs       the site of docs/, in build/docs; every warning is an error
# make bench      measures the networks and layers beside their twins; writes results/benchmarks.md
# make wheel      a wheel in dist/ with kernels for all GPUs and the platform tag that its libraries allow
# make lock       pins the packages of every environment anew; LOCK=--upgrade takes the newest versions
# make clean      removes everything that these made
# make help-all   the other targets
# Each target works from a bare clone: it first installs what it needs, in environments beside the sources.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where test processes share the cores, threads that wait for work must not keep a core busy. A test that hangs ends its process.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -o faulthandler_exit_on_timeout=true
PYTEST_PARALLEL := $(PYTEST) --numprocesses logical --maxprocesses 4
# Not $(MAKE) in a recipe that calls another program: `make -n` would run it.
MAKE_PROGRAM := $(MAKE)
# The environments are installed without compiled modules (--no-compile). Where Python may not write those that it compiles,
# each process that imports PyTorch compiles 4,000 modules again, for six seconds.
unexport PYTHONDONTWRITEBYTECODE
# Recipes call programs of the environment by their names.
WITH_BIN := PATH="$(abspath $(BIN)):$$PATH"

.PHONY: help help-all demo test test-all test-rest check lint newest docs bench clean
help:
	@sed -n '/^# make/,/^# Each target/s/^# //p' $(firstword $(MAKEFILE_LIST))
help-all: help
	@echo
	@sed -n 's/^# make/make/p; s/^#       /      /p' $(wordlist 2,$(words $(MAKEFILE_LIST)),$(MAKEFILE_LIST))

include make/environments.mk make/parts.mk make/long.mk make/wheels.mk

demo: $(VENV)/installed
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python samples/demo.py

# The tests of a second or less, and slow ones that show whether it works: the authors' results, each format, README.
CORE := (not slow and not apart) or core
test: $(VENV)/installed
	$(PYTEST_PARALLEL) -m "$(CORE)"

test-all: test
	$(MAKE) test-rest

# Everything but what `make test` runs. Two at a time: installations, compilers and tests of one process leave a core idle.
test-rest: $(VENV)/installed
	@echo "The environments of the other runtimes, servers and emulators: 5 GB, 5 minutes the first time" >&2
	$(MAKE) --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) environments
	$(BIN)/python scripts/run_parts.py --jobs 2 --make "$(MAKE_PROGRAM)" $(PARTS)

check: lint test

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A fault of a new version of a package shows here, and does not break the targets above.
newest: .venv/installed
	rm -rf .venv-newest
	$(MAKE) test VENV=.venv-newest
	.venv-newest/bin/mypy --cache-dir .venv-newest/mypy_cache

docs: $(VENV)/installed
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/docs

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks --write

clean:
	rm -rf .venv .venv-* build dist demo .mypy_cache .pytest_cache .ruff_cache
