# make demo    trains two small networks on real data, exports, verifies and serves them
# make test    lint, types and the whole test suite
# make test-cpp, make test-sanitizers    the kernels' own tests; with AddressSanitizer and UndefinedBehaviorSanitizer
# make wheel   a wheel in dist/ with the platform tag that its library can keep
# Each works from a bare clone: it makes its own environment in .venv first.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# The oldest ONNX Runtime that files must run on lives in an environment of its own: it needs NumPy 1.
OLDEST := .venv-onnxruntime-1.18
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# What the library is made of; installing compiles it.
LIBRARY_SOURCES := custom_ops/CMakeLists.txt $(wildcard $(addprefix custom_ops/,cmake/* include/nnorm/* kernels/* onnxruntime/*))
# ONNX Runtime's headers are fetched into it, once for all builds.
export NNORM_DOWNLOAD_CACHE ?= $(CURDIR)/build/downloads

.PHONY: help demo test test-cpp test-sanitizers lint bench wheel clean
help:
	@grep '^# make' Makefile | cut -c3-

demo: $(VENV)/installed
	$(BIN)/python samples/demo.py

test: $(VENV)/installed $(OLDEST)/installed lint
	NNORM_OLDEST_ONNXRUNTIME=$(OLDEST)/bin/python $(BIN)/python -m pytest --numprocesses 2

test-cpp: $(VENV)/installed
	$(call test_cpp,build/cpp,-DNNORM_WERROR=ON)

test-sanitizers: $(VENV)/installed
	$(call test_cpp,build/sanitized,-DNNORM_WERROR=ON -DNNORM_SANITIZE=ON)

# $(call test_cpp,FOLDER,OPTIONS): the environment has CMake and Ninja for machines without.
define test_cpp
	PATH="$(abspath $(BIN)):$$PATH" cmake -S custom_ops -B $(1) -G Ninja -DNNORM_BUILD_TESTS=ON $(2)
	PATH="$(abspath $(BIN)):$$PATH" cmake --build $(1)
	PATH="$(abspath $(BIN)):$$PATH" ctest --test-dir $(1) --output-on-failure --no-tests=error
endef

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.onnx_models --write

wheel: $(VENV)/installed
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl

# torch first and pinned: left to pip's choice it may come with gigabytes of another machine's accelerator.
$(VENV)/installed: pyproject.toml $(LIBRARY_SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) '$(TORCH)'
	$(BIN)/python $(PIP_INSTALL) --editable '.[test]'
	touch $@

# ONNX Runtime 1.18 has wheels up to Python 3.12; beyond, its test skips and says so.
$(OLDEST)/installed:
	$(PYTHON) -m venv $(OLDEST)
	if $(OLDEST)/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
		$(OLDEST)/bin/python $(PIP_INSTALL) 'onnxruntime==1.18.*' 'numpy<2'; fi
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist demo .mypy_cache .pytest_cache .ruff_cache
