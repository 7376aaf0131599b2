# make demo    trains two small networks on real data, exports, verifies and serves them
# make test    lint, types and the whole test suite
# Each works from a bare clone: it makes its own environment in .venv first.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# The oldest ONNX Runtime that files must run on lives in an environment of its own: it needs NumPy 1.
OLDEST := .venv-onnxruntime-1.18
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test lint bench clean
help:
	@grep '^# make' Makefile | cut -c3-

demo: $(VENV)/installed
	$(BIN)/python samples/demo.py

test: $(VENV)/installed $(OLDEST)/installed lint
	NNORM_OLDEST_ONNXRUNTIME=$(OLDEST)/bin/python $(BIN)/python -m pytest --numprocesses 2

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.onnx_models --write

# torch first and pinned: left to pip's choice it may come with gigabytes of another machine's accelerator.
$(VENV)/installed: pyproject.toml
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
