# The parts of `make test-rest`, and what else is tested apart. Each is a target of its own.

# The parts that `make test-rest` runs; NAME:OTHER waits for OTHER, whose files it uses.
PARTS := demo test-cpp test-sanitizers suite:test-cpp,test-sanitizers lint docs test-cuda-on-host:test-cpp \
	test-cuda-code:test-cpp bench-check:test-cpp same-bits-neon:test-cpp test-tensorrt:test-cpp test-tensorrt-registries:test-cpp \
	test-zoo test-ray test-tools $(TRITON:%=test-serving) $(TRITON_COMPILER:%=test-gpu-training)

# make suite    the tests of tests/ that `make test` leaves out
.PHONY: suite test-onnxruntime-versions test-tensorrt test-tensorrt-registries test-cpp bench-check test-sanitizers
suite: $(VENV)/installed $(IN_TEST:%=.venv-onnxruntime-%/installed) $(EVERYWHERE_IN_TEST:%=.venv-everywhere-%/installed)
	NNORM_OLDEST_ONNXRUNTIME="$(call interpreter,$(OLDEST))" \
	NNORM_ONNXRUNTIME_ENVIRONMENTS="$(call interpreters,$(IN_TEST))" \
	NNORM_SANITIZED_LIBRARY="$(if $(wildcard build/sanitized/libnnorm_ort.so),$(CURDIR)/build/sanitized/libnnorm_ort.so)" \
	NNORM_EVERYWHERE="$(EVERYWHERE_IN_TEST)" \
	$(PYTEST_PARALLEL) --durations 20 -m "slow and not core and not apart and not long" --ignore tests/custom_ops/test_cuda_code.py
	for environment in $(filter-out node,$(EVERYWHERE_IN_TEST)); do \
		PYTHONPATH="$(CURDIR)" NNORM_EXPORT_LIBRARY="$(call installed_library)" .venv-everywhere-$$environment/bin/python \
		-m pytest -p no:cacheprovider tests/runtimes/test_bodies_runners.py -k "$${environment%5}" || exit 1; \
	done

# $(call interpreters,VERSIONS): those that are installed, with ":" between them, as in PATH.
interpreters = $(shell for version in $(1); do test -s ".venv-onnxruntime-$$version/installed" && \
	printf '%s:' "$(CURDIR)/.venv-onnxruntime-$$version/bin/python"; done)

# make test-onnxruntime-versions    the kernels in each version of ONNX Runtime that is tested
test-onnxruntime-versions: $(VENV)/installed $(VERSIONS:%=.venv-onnxruntime-%/installed)
	NNORM_ONNXRUNTIME_ENVIRONMENTS="$(call interpreters,$(VERSIONS))" \
		$(PYTEST) tests/operators/test_onnxruntime_versions.py --verbose

# $(call build_cpp,FOLDER,OPTIONS), with the environment's CMake and Ninja. MAKEFLAGS names a jobserver that Ninja cannot
# open: it would say so in every run with --jobs.
define build_cpp
	$(WITH_BIN) cmake -S custom_ops -B $(1) -G Ninja -DNNORM_BUILD_TESTS=ON $(2)
	MAKEFLAGS= $(WITH_BIN) cmake --build $(1)
endef
define test_cpp
	$(call build_cpp,$(1),$(2))
	$(WITH_BIN) ctest --test-dir $(1) --parallel 2 --output-on-failure --no-tests=error
endef

# make test-cpp    the kernels' own tests; those for GPUs compiled for the processor, and for the GPU whose machine code the tests
#              read
OPTIONS_OF_TESTS := -DNNORM_WERROR=ON -DNNORM_CUDA_ARCHITECTURES=90
test-cpp: $(VENV)/installed $(NVCC)
	$(call test_cpp,build/cpp,$(OPTIONS_OF_TESTS))

# make test-sanitizers    the same with AddressSanitizer and UndefinedBehaviorSanitizer, without what `make test-cpp-long` adds
test-sanitizers: $(VENV)/installed
	$(call test_cpp,build/sanitized,-DNNORM_WERROR=ON -DNNORM_SANITIZE=ON -DNNORM_CUDA=OFF)

# make bench-check    the instructions of each CPU kernel, counted by valgrind, and of each GPU kernel, counted in its code: 3 %
#              more than on record fails; RECORD=--record writes them down. It counts the same on a busy machine, in 45 seconds
bench-check: test-cpp
	$(BIN)/python -m benchmarks.instructions build/cpp/count_instructions $(RECORD)
	$(BIN)/python -m benchmarks.machine_code build/cpp $(RECORD)

# make test-cuda-on-host    the tests of the operators with the kernels for GPUs compiled for the processor: those that run
#              kernels. The others do not depend on the library
# make test-cuda-code    the machine code of the kernels for GPUs, read without one
.PHONY: test-cuda-on-host test-cuda-code
test-cuda-on-host: $(VENV)/installed test-cpp
	NNORM_EXPORT_LIBRARY="$(CURDIR)/build/cpp/libnnorm_ort_cuda_on_host.so" \
	$(PYTEST_PARALLEL) tests/operators/test_operators.py tests/exporting/test_golden.py \
		-k "not test_golden.py or (portable and not body and not reference) or our_layers_in"
test-cuda-code: $(VENV)/installed test-cpp
	NNORM_EXPORT_LIBRARY="$(CURDIR)/build/cpp/libnnorm_ort.so" $(PYTEST) tests/custom_ops/test_cuda_code.py

# make test-gpu-training    the training kernels for GPUs in Triton's interpreter, on the authors' data too; and compiled for GPUs of
#              NVIDIA and AMD, which needs none
.PHONY: test-gpu-training
IN_TRITON = PYTHONPATH="$(CURDIR)" NNORM_EXPORT_LIBRARY="$(call installed_library)" TRITON_CACHE_DIR="$(CURDIR)/build/triton" \
	.venv-triton-compiler/bin/python -m pytest -p no:cacheprovider
test-gpu-training: $(VENV)/installed $(TRITON_COMPILER:%=.venv-%/installed)
	TRITON_INTERPRET=1 $(IN_TRITON) -m "not long" tests/layers/test_fused_on_gpu.py
	TRITON_INTERPRET=1 $(IN_TRITON) tests/layers/test_layers.py -k "operator and (bnn1d_trained or oracle)"
	$(IN_TRITON) tests/layers/test_fused_gpu_code.py

# make test-tensorrt    engines of the real TensorRT-RTX, which are built without a GPU, and their kernels counted;
#              RTX_VERSIONS='1.4 1.7' for other versions, NNORM_TENSORRT_ALL=1 for all combinations. One process for each
#              version: its plugins stay loaded, and its builds share the exported files
test-tensorrt: $(VENV)/installed test-cpp $(RTX:%=.venv-tensorrt-rtx-%/installed)
	for version in $(RTX); do \
		$(WITH_BIN) OMP_WAIT_POLICY=PASSIVE PYTHONPATH="$(CURDIR)" \
		NNORM_EXPORT_LIBRARY="$(CURDIR)/build/cpp/libnnorm_ort.so" \
		.venv-tensorrt-rtx-$$version/bin/python -m pytest -p no:cacheprovider \
			tests/tensorrt_engines/test_tensorrt_rtx*.py tests/project/test_tensorrt_sample.py || exit 1; \
	done

# make test-tensorrt-registries    the TensorRT plugins in the registries of NVIDIA's own libraries, which need no GPU: TensorRT's
#              lean and dispatch runtimes, TensorRT-RTX. NNORM_TENSORRT_LIBRARIES names further libraries, with ":" between them
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

# make same-bits-neon N=200000    the bits of the kernels for AArch64, which an emulator runs, beside this processor's. A million
#              values of each operator and type take half a minute
.PHONY: same-bits-neon
EMULATED := .venv-neon/bin/python custom_ops/tests/emulated/run.py
COMPARE := .venv-neon/bin/python custom_ops/tests/emulated/compare.py
same-bits-neon: N ?= 200000
same-bits-neon: test-cpp build/emulated/test_same_bits
	$(EMULATED) build/emulated/test_quantized_batch_normal_norm
	$(EMULATED) build/emulated/test_training
	build/cpp/test_same_bits $(N) > build/emulated/native.txt
	build/cpp/test_same_bits digests $(N) >> build/emulated/native.txt
	$(EMULATED) build/emulated/test_same_bits $(N) > build/emulated/emulated.txt
	$(EMULATED) build/emulated/test_same_bits digests $(N) >> build/emulated/emulated.txt
	$(COMPARE) build/emulated/native.txt build/emulated/emulated.txt

# The installed kernels.
installed_library = $$($(BIN)/python -c 'import nnorm_export; print(nnorm_export.get_library_path())')

# make test-zoo     seven architectures from conversion to kernel, the norms of all families of timm, decoders that generate text
# make test-serving    parity through a real Triton Inference Server, also one that is killed, in its own environment
# make test-ray    samples/ray on two local nodes, one of which is killed, in its own environment
# make test-tools    what is written for Kubernetes, MLflow, hubs and others, read by their own tools, in an environment of its own
.PHONY: test-zoo test-serving test-ray test-tools
# One thread: on a busy machine those of PyTorch wait for each other.
ZOO = OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)" NNORM_EXPORT_LIBRARY="$(call installed_library)" .venv-zoo/bin/python
IN_ZOO = $(ZOO) -m pytest -p no:cacheprovider -p no:logging tests/layers/test_zoo*.py
test-zoo: $(VENV)/installed .venv-zoo/installed
	$(IN_ZOO) -m "not long"

test-serving: $(VENV)/installed $(TRITON:%=.venv-%/installed)
	NNORM_TRITON_PYTHON="$(if $(TRITON),$(CURDIR)/.venv-triton/bin/python)" $(PYTEST) tests/serving/test_serving.py \
		tests/serving/test_failures_on_triton.py

test-ray: $(VENV)/installed .venv-ray/installed
	NNORM_RAY_PYTHON="$(CURDIR)/.venv-ray/bin/python" $(PYTEST) tests/project/test_ray.py -rP

# make test-converted    files of ExecuTorch, LiteRT and Core ML, by their own libraries, each in an environment of its own
# make test-aoti    AOTInductor's packages and programs of all recorded layers, packages of all related norms; `make test-all`
#              compiles some
# make test-everywhere    the files of export() in every runtime that PyPI and npm have, each in its own environment; writes
#              results/everywhere.md and the table in the README. EVERYWHERE='tract node' for some of them
# make test-quantizers    the files of export() in the quantizers of ONNX Runtime, NVIDIA, Intel, AMD and others, each in its own
#              environment; writes results/quantizers.md. QUANTIZERS='nncf quark' for some of them
.PHONY: test-converted test-aoti test-everywhere test-quantizers
CONVERTED := executorch litert coreml
test-converted: $(CONVERTED:%=.venv-everywhere-%/installed)
	for target in $(CONVERTED); do \
		OMP_WAIT_POLICY=PASSIVE PYTHONPATH="$(CURDIR)" NNORM_EXPORT_LIBRARY="$(call installed_library)" \
		.venv-everywhere-$$target/bin/python -m pytest -p no:cacheprovider tests/exporting/test_converted.py || exit 1; \
	done

test-aoti: $(VENV)/installed
	NNORM_ALL_OF_AOTI=1 $(PYTEST_PARALLEL) tests/exporting/test_pytorch_*.py tests/layers/test_family.py \
		-k 'aoti or test_recorded_layers'

test-everywhere: $(VENV)/installed .venv-zoo/installed .venv-onnxruntime-$(OLDEST)/installed $(EVERYWHERE:%=.venv-everywhere-%/installed)
	PYTHONPATH="$(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/support" OMP_NUM_THREADS=1 NNORM_EXPORT_LIBRARY="$(call installed_library)" \
		.venv-zoo/bin/python -m everywhere --jobs 2
	NNORM_EVERYWHERE="$(EVERYWHERE)" $(PYTEST) tests/runtimes/test_everywhere.py

QUANTIZERS := modelopt nncf quark neural-compressor
test-quantizers: $(VENV)/installed $(QUANTIZERS:%=.venv-quantizers-%/installed)
	PYTHONPATH="$(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/support" $(BIN)/python -m quantizers

test-tools: $(VENV)/installed .venv-tools/installed
	PYTHONPATH="$(CURDIR)" NNORM_EXPORT_LIBRARY="$(call installed_library)" OMP_WAIT_POLICY=PASSIVE \
		.venv-tools/bin/python -m pytest -p no:cacheprovider tests/tools
