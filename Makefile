# make demo    trains two small networks on real data, exports, verifies and serves them
# make test    lint, types and the whole test suite, that of the kernels and their sanitizers included
# make test-cpp, make test-sanitizers    the kernels' own tests; with AddressSanitizer and UndefinedBehaviorSanitizer
# make test-onnxruntime-versions    the kernels in every version of ONNX Runtime that they are tried with
# make wheel   a wheel in dist/ with the platform tag that its library can keep
# Each works from a bare clone: it makes its own environment in .venv first.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Every other ONNX Runtime lives in an environment of its own, .venv-onnxruntime-VERSION. 1.18 is the oldest that files
# and kernels must run on; it needs NumPy 1, and has wheels up to Python 3.12.
OLDEST := 1.18
VERSIONS := $(OLDEST) 1.20 1.22 1.24 1.27
# The interpreter of an environment, if ONNX Runtime could be installed into it.
interpreter = $(shell test -s .venv-onnxruntime-$(1)/installed && echo $(CURDIR)/.venv-onnxruntime-$(1)/bin/python)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# What the library is made of; installing compiles it.
LIBRARY_SOURCES := custom_ops/CMakeLists.txt $(wildcard $(addprefix custom_ops/,cmake/* include/nnorm/* kernels/* onnxruntime/*))
# ONNX Runtime's headers are fetched into it, once for all builds.
export NNORM_DOWNLOAD_CACHE ?= $(CURDIR)/build/downloads

.PHONY: help demo test test-cpp test-sanitizers test-onnxruntime-versions lint bench wheel clean
help:
	@grep '^# make' Makefile | cut -c3-

demo: $(VENV)/installed
	$(BIN)/python samples/demo.py

test: $(VENV)/installed .venv-onnxruntime-$(OLDEST)/installed lint test-cpp test-sanitizers
	NNORM_OLDEST_ONNXRUNTIME=$(call interpreter,$(OLDEST)) \
	NNORM_ONNXRUNTIME_ENVIRONMENTS=$(call interpreter,$(OLDEST)) \
	NNORM_SANITIZED_LIBRARY=$(CURDIR)/build/sanitized/libnnorm_ort.so \
	$(BIN)/python -m pytest --numprocesses 2

test-onnxruntime-versions: $(VENV)/installed $(VERSIONS:%=.venv-onnxruntime-%/installed)
	NNORM_ONNXRUNTIME_ENVIRONMENTS="$(foreach version,$(VERSIONS),$(call interpreter,$(version)))" \
	$(BIN)/python -m pytest tests/test_onnxruntime_versions.py --verbose

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
	$(BIN)/python -m benchmarks --write

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

.PRECIOUS: .venv-onnxruntime-%/installed
.venv-onnxruntime-%/installed:
	$(PYTHON) -m venv .venv-onnxruntime-$*
	if test $* != $(OLDEST) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
		.venv-onnxruntime-$*/bin/python $(PIP_INSTALL) 'onnxruntime==$*.*' $(if $(filter $(OLDEST),$*),'numpy<2') && \
		echo $* > $@; \
	else touch $@; fi

clean:
	rm -rf $(VENV) .venv-onnxruntime-* build dist demo .mypy_cache .pytest_cache .ruff_cache
