# make demo    trains two small networks on real data, exports, verifies and serves them
# make test    lint, types and the whole test suite, that of the kernels and their sanitizers included
# make test-cpp, make test-sanitizers    the kernels' own tests; with AddressSanitizer and UndefinedBehaviorSanitizer
# make test-onnxruntime-versions    the kernels in every version of ONNX Runtime that they are tried with
# make test-cuda-on-host    the operators' tests with the kernels of GPUs, run by the processor
# make test-serving    parity through a real Triton Inference Server, in an environment of its own
# make test-ray    samples/ray on two local nodes, one of them killed, in an environment of its own
# make test-gpu, make bench-gpu    on a machine with a GPU: everything that needs one; compute-sanitizer too where it is
# make wheel   a wheel in dist/ with the platform tag that its library can keep
# Each works from a bare clone: it makes its own environment in .venv first.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Every other ONNX Runtime lives in an environment of its own, .venv-onnxruntime-VERSION. 1.18 is the oldest that files
# and kernels must run on; it needs NumPy 1, and has wheels up to Python 3.12. `gpu` is onnxruntime-gpu, which takes the
# CUDA library into its sessions on machines without a GPU too.
OLDEST := 1.18
VERSIONS := $(OLDEST) 1.20 1.22 1.24 1.27 gpu
IN_TEST := $(OLDEST) gpu
# The interpreter of an environment, if ONNX Runtime could be installed into it.
interpreter = $(shell test -s .venv-onnxruntime-$(1)/installed && echo $(CURDIR)/.venv-onnxruntime-$(1)/bin/python)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# What the library is made of; installing compiles it.
LIBRARY_SOURCES := custom_ops/CMakeLists.txt $(wildcard $(addprefix custom_ops/,cmake/* include/nnorm/* cpu/* cuda/* onnxruntime/* onnxruntime/*/* tensorrt/*))
# ONNX Runtime's headers are fetched into it, once for all builds.
export NNORM_DOWNLOAD_CACHE ?= $(CURDIR)/build/downloads

# The kernels for GPUs are compiled by the machine's nvcc or, where it has none, by the one on PyPI.
SYSTEM_NVCC := $(or $(CUDACXX),$(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null))
ifeq ($(SYSTEM_NVCC)$(filter-out Linux,$(shell uname -s)),)
NVCC := .venv-nvcc/installed
export CUDACXX := $(CURDIR)/.venv-nvcc/cuda/bin/nvcc
endif

.PHONY: help demo test test-cpp test-sanitizers test-cuda-on-host test-onnxruntime-versions test-gpu test-serving test-ray lint bench bench-gpu
.PHONY: wheel clean
help:
	@grep '^# make' Makefile | cut -c3-

demo: $(VENV)/installed
	$(BIN)/python samples/demo.py

test: $(VENV)/installed $(IN_TEST:%=.venv-onnxruntime-%/installed) lint test-cpp test-sanitizers test-cuda-on-host
	NNORM_OLDEST_ONNXRUNTIME=$(call interpreter,$(OLDEST)) \
	NNORM_ONNXRUNTIME_ENVIRONMENTS="$(foreach version,$(IN_TEST),$(call interpreter,$(version)))" \
	NNORM_SANITIZED_LIBRARY=$(CURDIR)/build/sanitized/libnnorm_ort.so \
	$(BIN)/python -m pytest --numprocesses 2

test-onnxruntime-versions: $(VENV)/installed $(VERSIONS:%=.venv-onnxruntime-%/installed)
	NNORM_ONNXRUNTIME_ENVIRONMENTS="$(foreach version,$(VERSIONS),$(call interpreter,$(version)))" \
	$(BIN)/python -m pytest tests/test_onnxruntime_versions.py --verbose

# For one kind of GPU: the installation in .venv has compiled the kernels for all of them.
test-cpp: $(VENV)/installed
	$(call test_cpp,build/cpp,-DNNORM_WERROR=ON -DNNORM_CUDA_ARCHITECTURES=90)

test-sanitizers: $(VENV)/installed
	$(call test_cpp,build/sanitized,-DNNORM_WERROR=ON -DNNORM_SANITIZE=ON -DNNORM_CUDA=OFF)

test-cuda-on-host: $(VENV)/installed test-cpp
	NNORM_EXPORT_LIBRARY=$(CURDIR)/build/cpp/libnnorm_ort_cuda_on_host.so \
	$(BIN)/python -m pytest --numprocesses 2 tests/test_operators.py tests/test_golden.py

# $(call build_cpp,FOLDER,OPTIONS): the environment has CMake and Ninja for machines without.
define build_cpp
	PATH="$(abspath $(BIN)):$$PATH" cmake -S custom_ops -B $(1) -G Ninja -DNNORM_BUILD_TESTS=ON $(2)
	PATH="$(abspath $(BIN)):$$PATH" cmake --build $(1)
endef
define test_cpp
	$(call build_cpp,$(1),$(2))
	PATH="$(abspath $(BIN)):$$PATH" ctest --test-dir $(1) --output-on-failure --no-tests=error
endef

# On a machine with a GPU; elsewhere each part says why it is skipped. For machines that reach no network, GPU_PYTHON
# names an environment of the machine's own, with what the package needs and its extra `test-gpu`. Nothing is installed
# then; nvcc, CMake and Ninja are those in the PATH, ONNX Runtime's headers those in ONNXRUNTIME_INCLUDE_DIR. The package
# is run from this folder, with the kernels that are built here.
GPU := $(if $(shell nvidia-smi -L 2>/dev/null),native)
ifdef GPU_PYTHON
RUN_ON_GPU = NNORM_EXPORT_LIBRARY=$(CURDIR)/build/gpu/libnnorm_ort.so \
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON)
else
GPU_ENVIRONMENT := $(if $(GPU),.venv-gpu,$(VENV))
GPU_INSTALLED := $(VENV)/installed $(GPU_ENVIRONMENT)/installed
RUN_ON_GPU = $(GPU_ENVIRONMENT)/bin/python
endif
build_for_gpu = $(call build_cpp,build/gpu,$(if $(GPU),-DNNORM_CUDA=ON) -DNNORM_CUDA_ARCHITECTURES=$(or $(GPU),90))
test-gpu: $(GPU_INSTALLED)
	$(build_for_gpu)
	PATH="$(abspath $(BIN)):$$PATH" ctest --test-dir build/gpu --output-on-failure --no-tests=ignore -R gpu
	for tool in memcheck racecheck initcheck; do \
		if command -v compute-sanitizer && test -n "$(GPU)"; then \
			compute-sanitizer --tool $$tool --error-exitcode 1 build/gpu/test_cuda_kernels_gpu || exit 1; \
		else echo "compute-sanitizer's $$tool is skipped: there is no compute-sanitizer, or no GPU"; fi; done
	$(RUN_ON_GPU) -m pytest tests/gpu

bench-gpu: $(GPU_INSTALLED)
	$(build_for_gpu)
	if test -n "$(GPU)"; then build/gpu/bench_kernels_gpu && $(RUN_ON_GPU) -m benchmarks.gpu --write; \
	else echo "skipped: there is no GPU to measure"; fi

# nvidia-pytriton carries a tritonserver for Linux on x86-64 and Pythons up to 3.13.
TRITON := $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -))
test-serving: $(VENV)/installed $(TRITON:%=.venv-triton/installed)
	NNORM_TRITON_PYTHON=$(TRITON:%=$(CURDIR)/.venv-triton/bin/python) $(BIN)/python -m pytest tests/test_serving.py

test-ray: $(VENV)/installed .venv-ray/installed
	NNORM_RAY_PYTHON=$(CURDIR)/.venv-ray/bin/python $(BIN)/python -m pytest tests/test_ray.py -rP

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
$(VENV)/installed: pyproject.toml $(LIBRARY_SOURCES) $(NVCC)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) '$(TORCH)'
	$(BIN)/python $(PIP_INSTALL) --editable '.[test]'
	touch $@

# The packages lay the compiler out as an installation is, but for two links that CMake looks for.
.venv-nvcc/installed:
	$(PYTHON) -m venv .venv-nvcc
	.venv-nvcc/bin/python $(PIP_INSTALL) $(addprefix nvidia-,$(addsuffix ==13.0.*,\
		cuda-nvcc cuda-crt nvvm cuda-runtime cuda-cccl))
	ln -sfn $$(.venv-nvcc/bin/python -c "import nvidia; print(nvidia.__path__[0])")/cu13 .venv-nvcc/cuda
	ln -sfn lib .venv-nvcc/cuda/lib64
	ln -sfn libcudart.so.13 .venv-nvcc/cuda/lib/libcudart.so
	touch $@

.venv-gpu/installed: pyproject.toml $(LIBRARY_SOURCES) $(NVCC)
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python $(PIP_INSTALL) torch
	.venv-gpu/bin/python $(PIP_INSTALL) --editable '.[test-gpu]'
	touch $@

.venv-triton/installed:
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python $(PIP_INSTALL) nvidia-pytriton onnxruntime onnx ml_dtypes
	touch $@

# With all of the extra `ray` but nnorm_export itself, which the tests take from the clone.
.venv-ray/installed: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python $(PIP_INSTALL) 'ray[data,serve]' onnxruntime onnx ml_dtypes rich
	touch $@

.PRECIOUS: .venv-onnxruntime-%/installed
.venv-onnxruntime-%/installed:
	$(PYTHON) -m venv .venv-onnxruntime-$*
	if test $* = gpu; then \
		.venv-onnxruntime-gpu/bin/python $(PIP_INSTALL) onnxruntime-gpu && echo gpu > $@; \
	elif test $* != $(OLDEST) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
		.venv-onnxruntime-$*/bin/python $(PIP_INSTALL) 'onnxruntime==$*.*' $(if $(filter $(OLDEST),$*),'numpy<2') && \
		echo $* > $@; \
	else touch $@; fi

clean:
	rm -rf $(VENV) .venv-gpu .venv-nvcc .venv-ray .venv-triton .venv-onnxruntime-* build dist demo .mypy_cache .pytest_cache .ruff_cache
