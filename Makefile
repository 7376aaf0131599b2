# make demo    trains two small networks on real data, exports, verifies and serves them
# make check   lint, types and the fast tests, for every commit: a minute once installed
# make test    lint, types and the whole test suite, with the kernels' own tests and sanitizers; --jobs 2 overlaps them
# make test-cpp, make test-sanitizers    the kernels' own tests; with AddressSanitizer and UndefinedBehaviorSanitizer
# make bench-check    the instructions of each CPU kernel, counted by valgrind: 3 % more than on record fails; RECORD=--record
#              writes them down
# make same-bits N=1000000000    the bits of the kernels of all instruction sets, of N values for each operator and type
# make same-bits-neon N=400000    the same bits from the kernels for AArch64, which an emulator runs
# make same-bits-neon-long VALUES=1000000000    the same in QEMU, for an hour and a half; --jobs 2 halves it
# make every-float N=12    ψ of all 2³² float32 inputs at N exponents, and of all of 16 bits; writes custom_ops/tests/EVERY_FLOAT.md
# make docs    the site of docs/, in build/docs; every warning is an error. Its code runs in the tests
# make notebooks    runs the notebooks of docs/ and writes their outputs into them
# make docs-links    whether the links to other sites lead somewhere; needs a network
# make pictures    draws the pictures of the README and the site from benchmarks/RESULTS.md and the formulas
# make coverage-cpp    the kernels' own tests with the lines and branches that they run counted
# make test-onnxruntime-versions    the kernels in each version of ONNX Runtime that is tested
# make test-tensorrt    engines of the real TensorRT-RTX, which are built without a GPU, and their kernels counted;
#              RTX_VERSIONS='1.4 1.7 newest' for other versions, NNORM_TENSORRT_ALL=1 for all combinations
# make test-cuda-on-host    the tests of the operators with the kernels for GPUs compiled for the processor
# make test-serving    parity through a real Triton Inference Server, in its own environment
# make bench-serving    what Triton and Ray Serve add to a session; writes benchmarks/serving/RESULTS.md
# make test-ray    samples/ray on two local nodes, one of which is killed, in its own environment
# make test-tensorrt-registries    the TensorRT plugins in the registries of NVIDIA's own libraries; needs no GPU
# make test-quantizers    the files of export() in the quantizers of ONNX Runtime, NVIDIA, Intel, AMD and others, each in its own
#              environment; writes the table in tests/quantizers. QUANTIZERS='nncf quark' for some of them
# make test-gpu, make bench-gpu    the tests and benchmarks that need a GPU; with compute-sanitizer if it is installed
# make test-aoti    AOTInductor's packages of all recorded layers and all related norms; `make test` compiles a third
# make test-converted    files of ExecuTorch, LiteRT and Core ML, by their own libraries
# make test-everywhere    the files of export() in every runtime that PyPI and npm have, each in its own environment; writes
#              the tables in tests/everywhere and the README. EVERYWHERE='tract node' for some of them
# make fuzz-kernels N=1000000 SEED=1    random nodes against the kernels, their values compared with the formulas
# make fuzz-files N=100000    mutated files against every command; findings are kept in build/fuzz
# make fuzz-networks N=3000    random networks, run in every way and held against float64; resumes where it was stopped
# make fuzz-kills N=500    writers killed at random moments, their files read all the time
# make fuzz N=…    these four, N cases each
# make fuzz-guided N=100000    files mutated towards new branches of the code that reads them (atheris)
# make zoo     140 architectures of timm, torchvision and transformers: converted, trained, exported, verified, timed
# make test-zoo    twelve of them from conversion to kernel, the norms of all families of timm, the caches of decoders
# make wheel   a wheel in dist/ with kernels for all GPUs and the platform tag that its libraries allow
# make wheels  the source distribution, and from it the wheels for any Linux on x86-64 and AArch64, with the kernels for
#              processors: in dist/; make test-wheels looks at them, and builds them twice, into the same bytes
# make environments    installs everything that the tests above use; --jobs 2 overlaps the installations
# Each target works from a bare clone: it first installs the environment .venv.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Every other ONNX Runtime has its own environment, .venv-onnxruntime-VERSION. 1.18 is the oldest that files and kernels
# must run on; it needs NumPy 1 and has wheels up to Python 3.12. `gpu` is onnxruntime-gpu, which loads the CUDA library
# on machines without a GPU too.
OLDEST := 1.18
VERSIONS := $(OLDEST) 1.20 1.22 1.24 1.27 gpu
IN_TEST := $(OLDEST) gpu
# The interpreter of an environment, if ONNX Runtime could be installed into it.
interpreter = $(shell test -s .venv-onnxruntime-$(1)/installed && echo $(CURDIR)/.venv-onnxruntime-$(1)/bin/python)
# --no-compile: Python compiles the modules that are imported; torch and ray have thousands more.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# The sources of the library. The installation compiles it.
LIBRARY_SOURCES := custom_ops/CMakeLists.txt $(wildcard $(addprefix custom_ops/,cmake/* include/nnorm/* cpu/* cuda/* onnxruntime/* onnxruntime/*/* tensorrt/*))
# The folder for ONNX Runtime's headers, which are downloaded once for all builds.
export NNORM_DOWNLOAD_CACHE ?= $(CURDIR)/build/downloads
# The GPUs that the CUDA kernels in .venv are compiled for, if NNORM_CUDA_ARCHITECTURES does not say: the one whose machine
# code the tests read. test-cpp compiles for the oldest GPU, `make wheel` for all.
ARCHITECTURES := $(NNORM_CUDA_ARCHITECTURES)
export NNORM_CUDA_ARCHITECTURES ?= 90

# The kernels for GPUs are compiled by the machine's nvcc or, where it has none, by the one on PyPI.
SYSTEM_NVCC := $(or $(CUDACXX),$(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null))
ifeq ($(SYSTEM_NVCC)$(filter-out Linux,$(shell uname -s)),)
NVCC := .venv-nvcc/installed
export CUDACXX := $(CURDIR)/.venv-nvcc/cuda/bin/nvcc
endif

# NVIDIA's wheels of TensorRT-RTX are for Linux (and Windows). Each version has its own environment,
# .venv-tensorrt-rtx-VERSION, which takes all other packages from .venv.
RTX_VERSIONS := newest
RTX := $(if $(filter Linux,$(shell uname -s)),$(RTX_VERSIONS))

# The environments of the matrix of runtimes: .venv-everywhere-NAME, of the packages in tests/everywhere/packages. The quick
# ones run in `make test`. Node.js and its packages are used where npm is.
NPM := $(if $(shell command -v npm),node)
EVERYWHERE := onnxruntime onnxruntime-openvino opencv5 opencv4 tract iree tvm executorch litert $(NPM)
EVERYWHERE_IN_TEST := opencv5 tract $(NPM)

# The environments of the matrix of quantizers: .venv-quantizers-NAME, of the packages in tests/quantizers/packages.
QUANTIZERS := modelopt nncf quark neural-compressor

# nvidia-pytriton has a tritonserver for Linux on x86-64 and Python up to 3.13.
TRITON := $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -))

.PHONY: help demo environments check test test-cpp test-sanitizers test-cuda-on-host test-onnxruntime-versions test-tensorrt test-converted test-everywhere test-gpu test-serving test-ray lint bench bench-check bench-gpu
.PHONY: bench-serving test-quantizers test-aoti fuzz fuzz-kernels fuzz-files fuzz-networks fuzz-kills fuzz-guided
.PHONY: docs docs-links notebooks pictures coverage-cpp same-bits same-bits-neon same-bits-neon-long same-bits-zig every-float sdist wheel wheels test-wheels zoo test-zoo clean test-tensorrt-registries
help:
	@sed -n '/^# make/,/^# Each target/{/^# Each target/!s/^# //p}' Makefile

demo: $(VENV)/installed
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python samples/demo.py

# Where two test processes share two cores, threads that wait for work must not keep a core busy.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest
PYTEST_PARALLEL := $(PYTEST) --numprocesses 2

environments: $(VENV)/installed $(IN_TEST:%=.venv-onnxruntime-%/installed) $(TRITON:%=.venv-triton/installed) .venv-ray/installed \
	$(RTX:%=.venv-tensorrt-rtx-%/installed) $(EVERYWHERE_IN_TEST:%=.venv-everywhere-%/installed) .venv-zoo/installed \
	.venv-neon/installed

check: lint
	$(PYTEST_PARALLEL) -m "not slow"

test: $(VENV)/installed $(IN_TEST:%=.venv-onnxruntime-%/installed) $(EVERYWHERE_IN_TEST:%=.venv-everywhere-%/installed) lint test-cpp test-sanitizers test-cuda-on-host test-tensorrt \
		test-tensorrt-registries test-zoo same-bits-neon bench-check docs
	NNORM_OLDEST_ONNXRUNTIME=$(call interpreter,$(OLDEST)) \
	NNORM_ONNXRUNTIME_ENVIRONMENTS="$(foreach version,$(IN_TEST),$(call interpreter,$(version)))" \
	NNORM_SANITIZED_LIBRARY=$(CURDIR)/build/sanitized/libnnorm_ort.so \
	NNORM_EVERYWHERE="$(EVERYWHERE_IN_TEST)" \
	$(PYTEST_PARALLEL)

test-onnxruntime-versions: $(VENV)/installed $(VERSIONS:%=.venv-onnxruntime-%/installed)
	NNORM_ONNXRUNTIME_ENVIRONMENTS="$(foreach version,$(VERSIONS),$(call interpreter,$(version)))" \
	$(PYTEST) tests/test_onnxruntime_versions.py --verbose

# One process for each version: its plugins stay loaded, and its builds share the exported files.
test-tensorrt: $(VENV)/installed $(RTX:%=.venv-tensorrt-rtx-%/installed)
	for version in $(RTX); do \
		PATH="$(abspath $(BIN)):$$PATH" OMP_WAIT_POLICY=PASSIVE PYTHONPATH="$(CURDIR)" \
		NNORM_EXPORT_LIBRARY="$(call installed_library)" \
		.venv-tensorrt-rtx-$$version/bin/python -m pytest -p no:cacheprovider tests/test_tensorrt_rtx.py \
			tests/test_tensorrt_rtx_plugins.py tests/test_tensorrt_sample.py || exit 1; \
	done
# The installed kernels, beside which the plugins are if they were built.
installed_library = $$($(BIN)/python -c 'import nnorm_export; print(nnorm_export.get_library_path())')

OPTIONS_OF_TESTS := -DNNORM_WERROR=ON -DNNORM_CUDA_ARCHITECTURES=75
test-cpp: $(VENV)/installed
	$(call test_cpp,build/cpp,$(OPTIONS_OF_TESTS))

# valgrind counts the same on a busy machine; it takes 15 seconds.
bench-check: test-cpp
	$(BIN)/python -m benchmarks.instructions build/cpp/count_instructions $(RECORD)

test-sanitizers: $(VENV)/installed
	$(call test_cpp,build/sanitized,-DNNORM_WERROR=ON -DNNORM_SANITIZE=ON -DNNORM_CUDA=OFF)

same-bits: N ?= 1000000000
same-bits: build/cpp/test_same_bits
	$< $(N)

# The programs that run the CPU kernels alone, compiled for AArch64 and run by an emulator. A million values of each operator
# and type take half a minute.
EMULATED := .venv-neon/bin/python custom_ops/tests/emulated/run.py
COMPARE := .venv-neon/bin/python custom_ops/tests/emulated/compare.py
same-bits-neon: N ?= 400000
same-bits-neon: test-cpp build/emulated/test_same_bits
	$(EMULATED) build/emulated/test_quantized_batch_normal_norm
	build/cpp/test_same_bits $(N) > build/emulated/native.txt
	build/cpp/test_same_bits digests $(N) >> build/emulated/native.txt
	$(EMULATED) build/emulated/test_same_bits $(N) > build/emulated/emulated.txt
	$(EMULATED) build/emulated/test_same_bits digests $(N) >> build/emulated/emulated.txt
	$(COMPARE) build/emulated/native.txt build/emulated/emulated.txt

# QEMU is a second emulator, four times as fast: a core is busy for an hour and a half. What was computed is kept while the
# programs stay as they are; a run that was stopped goes on with the next operator and type.
VALUES := 1000000000
LONG := build/emulated/$(VALUES)
PAIRS := $(foreach type,float double float16 bfloat16,$(type)-BatchNormalNorm $(type)-LayerNormalNorm)
same-bits-neon-long: $(PAIRS:%=$(LONG)/%.native) $(PAIRS:%=$(LONG)/%.emulated)
	cat $(filter %.native,$^) > $(LONG)/native.txt
	cat $(filter %.emulated,$^) > $(LONG)/emulated.txt
	$(COMPARE) $(LONG)/native.txt $(LONG)/emulated.txt
$(LONG)/%.native: build/cpp/test_same_bits | qemu
	$(call digests,$<)
$(LONG)/%.emulated: build/emulated/test_same_bits | qemu
	$(call digests,qemu-aarch64-static -cpu cortex-a57 $<)
.PHONY: qemu
qemu:
	@command -v qemu-aarch64-static >/dev/null || \
		{ echo "there is no qemu-aarch64-static; install QEMU's user mode (on Debian: qemu-user-static)" >&2; exit 1; }
define digests
	@mkdir -p $(@D)
	$(1) digests $(VALUES) $(subst -, ,$*) > $@.part
	mv $@.part $@
endef

# A minute for each exponent, some for the bodies, and hours for AArch64 and the GPU's sources. ctest runs a sample.
every-float: N ?= 12
every-float: same-bits-neon-long
	mkdir -p build/every-float
	$(COMPARE) $(LONG)/native.txt $(LONG)/emulated.txt > build/every-float/processors.txt
	build/cpp/every_float long $(N) > build/every-float/kernels.txt
	build/cpp/test_cuda_same_bits 1000000000 > build/every-float/gpu.txt
	$(BIN)/python custom_ops/tests/every_float/bodies.py > build/every-float/bodies.txt
	PYTHONPATH="$(CURDIR)" $(BIN)/python custom_ops/tests/every_float/table.py build/every-float custom_ops/tests/EVERY_FLOAT.md

# The tests that run kernels: the others do not depend on the library, and `make test` runs them once.
test-cuda-on-host: $(VENV)/installed test-cpp
	NNORM_EXPORT_LIBRARY=$(CURDIR)/build/cpp/libnnorm_ort_cuda_on_host.so \
	$(PYTEST_PARALLEL) tests/test_operators.py tests/test_golden.py \
		-k "not test_golden.py or (portable and not body and not reference) or our_layers_in"

# $(call build_cpp,FOLDER,OPTIONS), with the environment's CMake and Ninja. MAKEFLAGS names a jobserver that Ninja cannot
# open: it would say so in every run with --jobs.
define build_cpp
	PATH="$(abspath $(BIN)):$$PATH" cmake -S custom_ops -B $(1) -G Ninja -DNNORM_BUILD_TESTS=ON $(2)
	MAKEFLAGS= PATH="$(abspath $(BIN)):$$PATH" cmake --build $(1)
endef
# Every program there. CMake knows what it must compile again, and make looks at the time of the file afterwards.
build/cpp/test_same_bits: $(VENV)/installed always
	$(call build_cpp,build/cpp,$(OPTIONS_OF_TESTS))
build/emulated/test_same_bits: $(VENV)/installed .venv-neon/installed always
	$(call build_with_zig,build/emulated,aarch64-linux-musl,test_same_bits test_quantized_batch_normal_norm)
.PHONY: always
# $(call build_with_zig,FOLDER,TARGET,PROGRAMS). Zig keeps the libraries that it compiled in $(ZIG_GLOBAL_CACHE_DIR).
ZIG = $$(realpath .venv-neon/lib/python*/site-packages/ziglang/zig)
ZIG_CACHE := ZIG_GLOBAL_CACHE_DIR=$(CURDIR)/.venv-neon/zig
define build_with_zig
	PATH="$(abspath $(BIN)):$$PATH" $(ZIG_CACHE) cmake -S custom_ops -B $(1) -G Ninja --toolchain cmake/zig_toolchain.cmake \
		-DNNORM_ZIG=$(ZIG) -DNNORM_ZIG_TARGET=$(2) -DNNORM_BUILD_TESTS=ON -DNNORM_CUDA=OFF -DNNORM_WERROR=ON
	MAKEFLAGS= PATH="$(abspath $(BIN)):$$PATH" $(ZIG_CACHE) cmake --build $(1) --target $(3)
endef
define test_cpp
	$(call build_cpp,$(1),$(2))
	PATH="$(abspath $(BIN)):$$PATH" ctest --test-dir $(1) --parallel 2 --output-on-failure --no-tests=error
endef

# The code without its tests; branches to the handling of exceptions that the compiler adds are not counted. The first
# figures count each instance of a template, the second ones merge them. TENSORRT_INCLUDE_DIR: see cmake/TensorRT.cmake.
GCOVR = .venv-gcovr/bin/gcovr --root custom_ops --exclude custom_ops/tests/ --exclude-throw-branches \
	--exclude-unreachable-branches --print-summary
coverage-cpp: $(VENV)/installed .venv-gcovr/installed
	$(call build_cpp,build/coverage,-DNNORM_COVERAGE=ON -DNNORM_CUDA=OFF)
	find build/coverage -name '*.gcda' -delete
	PATH="$(abspath $(BIN)):$$PATH" ctest --test-dir build/coverage --parallel 2 --output-on-failure --no-tests=error
	$(GCOVR) --json build/coverage/coverage.json build/coverage
	$(GCOVR) --txt-metric branch --add-tracefile build/coverage/coverage.json
	$(GCOVR) --txt-metric branch --add-tracefile build/coverage/coverage.json --merge-lines

# For machines with a GPU; on others each part says why it is skipped. For machines without a network, GPU_PYTHON names
# an existing environment with the package's dependencies and its extra `test-gpu`. Nothing is installed then: nvcc, CMake
# and Ninja are taken from the PATH, ONNX Runtime's headers from ONNXRUNTIME_INCLUDE_DIR, the package from this folder and
# its kernels from build/gpu.
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
# The formats that other libraries write, each in an environment of its own.
CONVERTED := executorch litert coreml
test-converted: $(CONVERTED:%=.venv-everywhere-%/installed)
	for target in $(CONVERTED); do \
		OMP_WAIT_POLICY=PASSIVE PYTHONPATH="$(CURDIR)" NNORM_EXPORT_LIBRARY="$(call installed_library)" \
		.venv-everywhere-$$target/bin/python -m pytest -p no:cacheprovider tests/test_converted.py || exit 1; \
	done

test-aoti: $(VENV)/installed
	NNORM_ALL_OF_AOTI=1 $(PYTEST_PARALLEL) tests/test_pytorch_formats.py tests/test_family.py -k aoti

test-gpu: $(GPU_INSTALLED)
	$(build_for_gpu)
	PATH="$(abspath $(BIN)):$$PATH" ctest --test-dir build/gpu --output-on-failure --no-tests=ignore -R gpu
	for tool in memcheck racecheck initcheck; do \
		if command -v compute-sanitizer && test -n "$(GPU)"; then \
			compute-sanitizer --tool $$tool --error-exitcode 1 build/gpu/test_cuda_kernels_gpu || exit 1; \
		else echo "compute-sanitizer's $$tool is skipped: there is no compute-sanitizer, or no GPU"; fi; done
	if test -n "$(GPU)"; then $(RUN_ON_GPU) -m pytest tests/gpu; else echo "tests/gpu is skipped: there is no GPU"; fi

# The plugin registries of NVIDIA's own libraries, which need no GPU: TensorRT's lean and dispatch runtimes, TensorRT-RTX.
# NNORM_TENSORRT_LIBRARIES names further libraries, with ":" between them.
REGISTRIES := tensorrt-lean-cu13-libs==10.15.1.29 tensorrt-lean-cu13-libs==10.16.1.11 tensorrt-lean-cu13-libs==11.1.0.106 \
	tensorrt-lean-cu13-libs==11.4.0.106 tensorrt-dispatch-cu13-libs==10.16.1.11 tensorrt-dispatch-cu13-libs==11.4.0.106 \
	tensorrt-rtx-cu13-libs==1.4.0.76 tensorrt-rtx-cu13-libs==1.7.1.116
REGISTRY_FOLDERS := $(addprefix build/registries/,$(subst ==,-,$(REGISTRIES)))
test-tensorrt-registries: $(VENV)/installed test-cpp
	if test -x build/cpp/test_tensorrt_registration; then $(MAKE) $(REGISTRY_FOLDERS) && \
		NNORM_TENSORRT_LIBRARIES=$$(ls $(REGISTRY_FOLDERS:%=%/*/libnvinfer_[dl]*.so.*) $(REGISTRY_FOLDERS:%=%/*/libtensorrt_rtx.so.1) \
			2>/dev/null | paste -sd:)$${NNORM_TENSORRT_LIBRARIES:+:$$NNORM_TENSORRT_LIBRARIES} build/cpp/test_tensorrt_registration; \
	else echo "TensorRT's registries are skipped: TensorRT's headers were not found; set TENSORRT_INCLUDE_DIR"; fi

build/registries/%: | $(VENV)/installed
	rm -rf $@.part
	$(BIN)/python $(PIP_INSTALL) --no-deps --target $@.part $(filter $(shell echo $* | sed 's/\(.*\)-/\1==/'),$(REGISTRIES))
	mv $@.part $@

bench-gpu: $(GPU_INSTALLED)
	$(build_for_gpu)
	if test -n "$(GPU)"; then build/gpu/bench_kernels_gpu && $(RUN_ON_GPU) -m benchmarks.gpu --write; \
	else echo "skipped: there is no GPU to measure"; fi

test-serving: $(VENV)/installed $(TRITON:%=.venv-triton/installed)
	NNORM_TRITON_PYTHON=$(TRITON:%=$(CURDIR)/.venv-triton/bin/python) $(PYTEST) tests/test_serving.py

# Ray listens to every interface, therefore it gets a network of its own.
bench-serving: $(VENV)/installed .venv-triton/installed .venv-ray/installed
	PYTHONPATH="$(CURDIR)/tests" $(BIN)/python -m benchmarks.serving triton --python .venv-triton/bin/python --write
	PYTHONPATH="$(CURDIR)/tests" unshare --map-root-user --net --pid --fork --kill-child --mount-proc \
		$(BIN)/python -m benchmarks.serving ray --python .venv-ray/bin/python --write

test-everywhere: $(VENV)/installed .venv-onnxruntime-$(OLDEST)/installed $(EVERYWHERE:%=.venv-everywhere-%/installed)
	PYTHONPATH="$(CURDIR):$(CURDIR)/tests" $(BIN)/python -m everywhere --jobs 2
	NNORM_EVERYWHERE="$(EVERYWHERE)" $(PYTEST) tests/test_everywhere.py

test-quantizers: $(VENV)/installed $(QUANTIZERS:%=.venv-quantizers-%/installed)
	PYTHONPATH="$(CURDIR):$(CURDIR)/tests" $(BIN)/python -m quantizers

# Long runs, see tests/fuzz/RESULTS.md. `make test` runs a few cases of each: ctest runs 20 000 nodes, and some under the
# sanitizers; pytest replays the kept files and draws new ones, and runs 50 networks.
fuzz: fuzz-kernels fuzz-files fuzz-networks fuzz-kills

SEED ?= 1
fuzz-kernels: N ?= 1000000
fuzz-kernels: build/cpp/test_same_bits
	build/cpp/fuzz_operators $(N) $(SEED)
	build/cpp/fuzz_quantized_operators $(N) $(SEED)

fuzz-files: N ?= 100000
fuzz-files: $(VENV)/installed
	$(BIN)/python tests/fuzz/files.py --cases $(N) --first $$(date +%s)000 --jobs 2 --keep build/fuzz

fuzz-networks: N ?= 3000
fuzz-networks: $(VENV)/installed
	$(BIN)/python tests/fuzz/networks.py --count $(N) --jobs 2

fuzz-kills: N ?= 500
fuzz-kills: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/kills.py $(N) --seed $(SEED)

GUIDED := onnx torchscript program checkpoint safetensors inputs
fuzz-guided: N ?= 100000
fuzz-guided: $(VENV)/installed .venv-atheris/installed
	mkdir -p build/fuzz
	for target in $(GUIDED); do \
		PYTHONPATH="$(CURDIR)" NNORM_EXPORT_LIBRARY="$(call installed_library)" .venv-atheris/bin/python \
			tests/fuzz/guided.py $$target -runs=$(N) -print_final_stats=1 -artifact_prefix=build/fuzz/ || exit 1; \
	done

test-ray: $(VENV)/installed .venv-ray/installed
	NNORM_RAY_PYTHON=$(CURDIR)/.venv-ray/bin/python $(PYTEST) tests/test_ray.py -rP

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/docs

notebooks: $(VENV)/installed
	$(BIN)/python scripts/run_notebooks.py

docs-links: $(VENV)/installed
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b linkcheck docs build/docs-links

pictures: $(VENV)/installed
	$(BIN)/python docs/pictures/draw.py

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks --write

# What is in build/zoo already is not measured again.
zoo: $(VENV)/installed .venv-zoo/installed
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)" NNORM_EXPORT_LIBRARY="$(call installed_library)" \
		.venv-zoo/bin/python -m benchmarks.zoo --write
	NNORM_ALL_OF_TIMM=1 OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)" \
		.venv-zoo/bin/python -m pytest -p no:cacheprovider -p no:logging tests/test_zoo.py -k family

# One thread: on a busy machine those of PyTorch wait for each other.
test-zoo: $(VENV)/installed .venv-zoo/installed
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)" NNORM_EXPORT_LIBRARY="$(call installed_library)" \
		.venv-zoo/bin/python -m pytest -p no:cacheprovider -p no:logging tests/test_zoo.py

# The same sources give the same files: their date is the commit's.
SOURCE_DATE_EPOCH ?= $(or $(shell git log -1 --format=%ct 2>/dev/null),0)
sdist wheel wheels-%: export SOURCE_DATE_EPOCH := $(SOURCE_DATE_EPOCH)

wheel: $(VENV)/installed
	rm -rf build/wheel
	NNORM_CUDA_ARCHITECTURES='$(ARCHITECTURES)' $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude libtensorrt_rtx.so.1 --wheel-dir dist build/wheel/*.whl

sdist: $(VENV)/installed
	rm -rf build/sdist
	$(BIN)/python -c 'import scikit_build_core.build as b; b.build_sdist("build/sdist")'
	mkdir -p dist
	cp build/sdist/*.tar.gz dist

# Built by Zig from the source distribution, for the oldest glibc that ONNX Runtime's wheels take. The kernels are those for
# processors; `make wheel` has those for GPUs too. The variable is Python's own for cross compilation: the wheel's platform.
MACHINES := x86_64 aarch64
wheels: $(MACHINES:%=wheels-%)
wheels-%: sdist .venv-neon/installed
	rm -rf build/wheels/$*
	PATH="$(abspath $(BIN)):$$PATH" $(ZIG_CACHE) _PYTHON_HOST_PLATFORM=linux-$* NNORM_CUDA=OFF NNORM_EXPORT_BUILD_LIBRARY=1 \
		$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir --wheel-dir build/wheels/$* \
		--config-settings=build-dir=$(CURDIR)/build/wheels/$*/build --config-settings=install.strip=false \
		--config-settings=wheel.reproducible=true --config-settings=cmake.define.NNORM_WERROR=ON \
		--config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE=cmake/zig_toolchain.cmake \
		--config-settings=cmake.define.NNORM_ZIG=$(ZIG) --config-settings=cmake.define.NNORM_ZIG_TARGET=$*-linux-gnu.2.28 \
		build/sdist/*.tar.gz
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir build/wheels/$*/repaired build/wheels/$*/*.whl
	cp build/wheels/$*/repaired/*.whl dist

# Built twice, the same bytes; and the kernels of both compilers: the same instruction sets chosen, the same bits. QEMU and a
# C library for AArch64 (apt install qemu-user-static libc6-arm64-cross) load that wheel's library too.
test-wheels: wheels
	rm -rf build/first-wheels
	mkdir build/first-wheels
	cp build/sdist/*.tar.gz $(MACHINES:%=build/wheels/%/repaired/*.whl) build/first-wheels
	$(MAKE) wheels
	for file in build/first-wheels/*; do cmp $$file dist/$${file##*/} || exit 1; done
	$(call build_with_zig,build/zig-x86_64,x86_64-linux-gnu.2.28,load_library)
	$(call build_with_zig,build/zig-aarch64,aarch64-linux-gnu.2.28,load_library)
	NNORM_WHEELS=$(CURDIR)/build/wheels $(PYTEST) tests/test_wheels.py
	if test "$$(uname -m)" = x86_64; then $(MAKE) same-bits-zig; fi

same-bits-zig: N ?= 400000
same-bits-zig: build/cpp/test_same_bits .venv-neon/installed
	$(call build_with_zig,build/zig-x86_64,x86_64-linux-gnu.2.28,test_same_bits test_quantized_batch_normal_norm)
	build/zig-x86_64/test_quantized_batch_normal_norm
	build/cpp/test_same_bits $(N) | grep '^digest' > build/zig-x86_64/native.txt
	build/zig-x86_64/test_same_bits $(N) | grep '^digest' | diff build/zig-x86_64/native.txt -

# torch first and pinned: pip's choice may have gigabytes of CUDA libraries. The build's own tools stay in .venv, so that
# the tests' builds find the folder of this one up to date.
$(VENV)/installed: pyproject.toml $(LIBRARY_SOURCES) $(NVCC)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) '$(TORCH)' scikit-build-core cmake ninja
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation \
		--config-settings=cmake.define.NNORM_WERROR=ON --editable '.[test]'
	touch $@

# The packages have the folders of an installed CUDA toolkit, except two links that CMake looks for.
.venv-nvcc/installed:
	$(PYTHON) -m venv .venv-nvcc
	.venv-nvcc/bin/python $(PIP_INSTALL) $(addprefix nvidia-,$(addsuffix ==13.0.*,\
		cuda-nvcc cuda-crt nvvm cuda-runtime cuda-cccl))
	ln -sfn $$(.venv-nvcc/bin/python -c "import nvidia; print(nvidia.__path__[0])")/cu13 .venv-nvcc/cuda
	ln -sfn lib .venv-nvcc/cuda/lib64
	ln -sfn libcudart.so.13 .venv-nvcc/cuda/lib/libcudart.so
	touch $@

.venv-gcovr/installed:
	$(PYTHON) -m venv .venv-gcovr
	.venv-gcovr/bin/python $(PIP_INSTALL) gcovr
	touch $@

.venv-gpu/installed: pyproject.toml $(LIBRARY_SOURCES) $(NVCC) | $(VENV)/installed # they share the build's folder
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python $(PIP_INSTALL) torch
	NNORM_CUDA_ARCHITECTURES=native .venv-gpu/bin/python $(PIP_INSTALL) --editable '.[test-gpu]'
	touch $@

# Zig compiles its C and C++ libraries for AArch64 with the first program, in a minute, and keeps them.
.venv-neon/installed: export ZIG_GLOBAL_CACHE_DIR = $(CURDIR)/.venv-neon/zig
.venv-neon/installed:
	$(PYTHON) -m venv .venv-neon
	.venv-neon/bin/python $(PIP_INSTALL) unicorn==2.1.4 ziglang==0.17.1
	printf '#include <string>\nint main(int, char** v) { return int(std::stoul(*v)); }' | \
		.venv-neon/bin/python -m ziglang c++ --target=aarch64-linux-musl -O3 -DNDEBUG -std=c++17 -fPIC -x c++ - -o .venv-neon/first
	touch $@

.venv-triton/installed:
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python $(PIP_INSTALL) nvidia-pytriton onnxruntime onnx ml_dtypes lazy_loader
	touch $@

# The dependencies of the extra `ray`; the tests import nnorm_export from the clone.
.venv-ray/installed: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python $(PIP_INSTALL) 'ray[data,serve]' onnxruntime onnx ml_dtypes lazy_loader rich
	touch $@

.PRECIOUS: .venv-tensorrt-rtx-%/installed
.venv-tensorrt-rtx-%/installed: | $(VENV)/installed
	$(PYTHON) -m venv .venv-tensorrt-rtx-$*
	.venv-tensorrt-rtx-$*/bin/python $(PIP_INSTALL) --no-deps $(foreach part,-libs -bindings,\
		'tensorrt-rtx-cu13$(part)$(if $(filter newest,$*),,==$*.*)')
	.venv-tensorrt-rtx-$*/bin/python $(PIP_INSTALL) --no-deps 'tensorrt-rtx-cu13$(if $(filter newest,$*),,==$*.*)'
	$(call take_packages,.venv-tensorrt-rtx-$*)
	touch $@

.PRECIOUS: .venv-everywhere-%/installed
.venv-everywhere-%/installed: tests/everywhere/packages/%.txt | $(VENV)/installed
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --no-deps --requirement $<
	$(call take_packages,$(@D))
	touch $@

# What the tools need and the environment of the tests has is not installed again.
.PRECIOUS: .venv-quantizers-%/installed
.venv-quantizers-%/installed: tests/quantizers/packages/%.txt | $(VENV)/installed
	$(PYTHON) -m venv $(@D)
	$(call take_packages,$(@D))
	$(@D)/bin/python $(PIP_INSTALL) --requirement $<
	touch $@

# --ignore-scripts: the one of onnxruntime-node downloads libraries for CUDA.
.venv-everywhere-node/installed: tests/everywhere/packages/node/package.json
	mkdir -p $(@D)
	cp $< $(@D)/package.json
	npm install --prefix $(@D) --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel error
	touch $@

# torchvision without its dependencies: they would take another torch. The versions are those of the table.
.venv-zoo/installed: | $(VENV)/installed
	$(PYTHON) -m venv .venv-zoo
	$(call take_packages,.venv-zoo)
	.venv-zoo/bin/python $(PIP_INSTALL) --no-deps timm==1.0.31 torchvision==0.29.2
	.venv-zoo/bin/python $(PIP_INSTALL) transformers==5.23.0 pillow
	touch $@

.venv-atheris/installed: | $(VENV)/installed
	$(PYTHON) -m venv .venv-atheris
	.venv-atheris/bin/python $(PIP_INSTALL) atheris
	$(call take_packages,.venv-atheris)
	touch $@

# $(call take_packages,ENVIRONMENT): all other packages come from .venv.
take_packages = $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	> $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth

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
	rm -rf $(VENV) .venv-atheris .venv-everywhere-* .venv-quantizers-* .venv-gcovr .venv-gpu .venv-neon .venv-tensorrt-rtx-* .venv-nvcc .venv-ray .venv-triton .venv-zoo .venv-onnxruntime-* build dist demo .mypy_cache .pytest_cache .ruff_cache
