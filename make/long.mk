# What takes minutes to hours, or a GPU, and is not part of `make test-all`.

# make suite-long    the tests of tests/ that take longest, each beside shorter ones that `make suite` runs
.PHONY: suite-long
suite-long: $(VENV)/installed .venv-zoo/installed $(TRITON_COMPILER:%=.venv-%/installed)
	$(PYTEST_PARALLEL) --durations 20 -m long
	$(IN_ZOO) -m long
	$(if $(TRITON_COMPILER),TRITON_INTERPRET=1 $(IN_TRITON) -m long tests/layers/test_fused_on_gpu.py)

# make test-cpp-long    the kernels' own tests with all checks of the sanitizers and with both arithmetics of 16-bit tensors on
#              GPUs; and the kernels of bfloat16 for the oldest GPU, compiled
.PHONY: test-cpp-long
test-cpp-long: $(VENV)/installed $(NVCC)
	$(call test_cpp,build/sanitized-all,-DNNORM_WERROR=ON -DNNORM_SANITIZE=ALL -DNNORM_CUDA=OFF)
	$(WITH_BIN) cmake -S custom_ops -B build/cpp -G Ninja -DNNORM_BUILD_TESTS=ON $(OPTIONS_OF_TESTS)
	MAKEFLAGS= $(WITH_BIN) cmake --build build/cpp --target test_cuda_kernels
	build/cpp/test_cuda_kernels
	if grep -q nnorm_cuda_oldest_bfloat16 build/cpp/build.ninja; then \
		MAKEFLAGS= $(WITH_BIN) cmake --build build/cpp --target nnorm_cuda_oldest_bfloat16; \
	else echo "the kernels for GPUs are not built: nvcc was not found"; fi

# make test-container    builds the image of samples/container by buildah, without a daemon, and serves in it, read-only: 10
#              to 20 minutes, for root on Debian with buildah and debootstrap
.PHONY: test-container
test-container: $(VENV)/installed
	$(BIN)/python scripts/try_image.py

# make test-pythons    `make test` and the types in a fresh clone for each Python that is found; PYTHONS='3.10 3.13' for some
.PHONY: test-pythons
test-pythons:
	$(PYTHON) scripts/test_pythons.py $(PYTHONS)

# make same-bits N=1000000000    the bits of the kernels of all instruction sets, of N values for each operator and type
# make same-bits-neon-long VALUES=1000000000    the same in QEMU, for an hour and a half; --jobs 2 halves it
# make every-float N=12    ψ of all 2³² float32 inputs at N exponents, and of all of 16 bits; writes results/every_float.md
.PHONY: same-bits same-bits-neon-long every-float
same-bits: N ?= 1000000000
same-bits: build/cpp/test_same_bits
	$< $(N)

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
	PYTHONPATH="$(CURDIR)" $(BIN)/python custom_ops/tests/every_float/table.py build/every-float results/every_float.md

# Every program there. CMake knows what it must compile again, and make looks at the time of the file afterwards.
build/cpp/test_same_bits: $(VENV)/installed $(NVCC) always
	$(call build_cpp,build/cpp,$(OPTIONS_OF_TESTS))
build/emulated/test_same_bits: $(VENV)/installed .venv-neon/installed always
	$(call build_with_zig,build/emulated,aarch64-linux-musl,test_same_bits test_quantized_batch_normal_norm test_training)
.PHONY: always
# $(call build_with_zig,FOLDER,TARGET,PROGRAMS). Zig keeps the libraries that it compiled in $(ZIG_GLOBAL_CACHE_DIR).
ZIG = "$$(realpath .venv-neon/lib/python*/site-packages/ziglang/zig)"
ZIG_CACHE := ZIG_GLOBAL_CACHE_DIR="$(CURDIR)/.venv-neon/zig"
define build_with_zig
	$(WITH_BIN) $(ZIG_CACHE) cmake -S custom_ops -B $(1) -G Ninja --toolchain cmake/zig_toolchain.cmake \
		-DNNORM_ZIG=$(ZIG) -DNNORM_ZIG_TARGET=$(2) -DNNORM_BUILD_TESTS=ON -DNNORM_CUDA=OFF -DNNORM_WERROR=ON
	MAKEFLAGS= $(WITH_BIN) $(ZIG_CACHE) cmake --build $(1) --target $(3)
endef

# make fuzz-kernels N=1000000 SEED=1    random nodes against the kernels, their values compared with the formulas
# make fuzz-files N=100000    mutated files against every command; findings are kept in build/fuzz
# make fuzz-networks N=3000    random networks, run in every way and held against float64; resumes where it was stopped
# make fuzz-kills N=500    writers killed at random moments, their files read all the time
# make fuzz N=…    these four, N cases each
# make fuzz-guided N=100000    files mutated towards new branches of the code that reads them (atheris)
.PHONY: fuzz fuzz-kernels fuzz-files fuzz-networks fuzz-kills fuzz-guided
# results/fuzz.md has their figures. `make test-all` runs a few cases of each: ctest runs 20 000 nodes, and some under the
# sanitizers; pytest replays the kept files and draws new ones, and runs 30 networks.
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

# make zoo     155 architectures of timm, torchvision and transformers: converted, trained, exported, verified, timed. What is in
#              build/zoo already is not measured again
# make bench-token    the price of one token: a row of LayerNormalNorm, and a step of GPT-2, beside plain norms
# make bench-bodies    the bodies beside plain norms, in the newest and the oldest ONNX Runtime and in WebAssembly;
#              BEFORE=FOLDER beside those that `python -m benchmarks.bodies --keep FOLDER` kept at another commit
# make bench-training   training steps beside plain norms; writes results/training.md
# make bench-serving    what Triton and Ray Serve add to a session; writes results/serving.md
# make coverage-cpp    the kernels' own tests with the lines and branches that they run counted
# make notebooks    runs the notebooks of docs/ and writes their outputs into them
# make docs-links    whether the links to other sites lead somewhere; needs a network
# make pictures    draws the pictures of the README and the site from results/benchmarks.md and the formulas
# make bench-failures    ten minutes of load on Triton and on Ray Serve, which are killed meanwhile; writes results/failures.md
.PHONY: zoo bench-token bench-bodies bench-training bench-serving bench-failures coverage-cpp notebooks docs-links pictures
zoo: $(VENV)/installed .venv-zoo/installed
	$(ZOO) -m benchmarks.zoo --write
	NNORM_ALL_OF_TIMM=1 $(IN_ZOO) -k family

bench-token: $(VENV)/installed .venv-zoo/installed
	$(ZOO) -m benchmarks.one_token --write

bench-bodies: $(VENV)/installed .venv-onnxruntime-$(OLDEST)/installed $(NPM:%=.venv-everywhere-%/installed)
	$(BIN)/python -m benchmarks.bodies --python $(call interpreter,$(OLDEST)) \
		$(NPM:%=--node-modules .venv-everywhere-%/node_modules) $(BEFORE:%=--before %) --write

bench-training: $(VENV)/installed
	$(BIN)/python -m benchmarks.training --write

# Ray listens to every interface, therefore it gets a network of its own.
bench-serving: $(VENV)/installed .venv-triton/installed .venv-ray/installed
	PYTHONPATH="$(CURDIR)/tests/support" $(BIN)/python -m benchmarks.serving triton --python .venv-triton/bin/python --write
	PYTHONPATH="$(CURDIR)/tests/support" unshare --map-root-user --net --pid --fork --kill-child --mount-proc \
		$(BIN)/python -m benchmarks.serving ray --python .venv-ray/bin/python --write

# In a network and a space of processes of its own: what was killed leaves nothing behind.
bench-failures: MINUTES ?= 10
bench-failures: $(VENV)/installed .venv-triton/installed .venv-ray/installed
	for server in triton ray; do \
		PYTHONPATH="$(CURDIR)/tests/support" unshare --map-root-user --net --pid --fork --kill-child --mount-proc \
			$(BIN)/python -m benchmarks.failures $$server --python .venv-$$server/bin/python --minutes $(MINUTES) --write \
			|| exit 1; \
	done

# The code without its tests; branches to the handling of exceptions that the compiler adds are not counted. The first
# figures count each instance of a template, the second ones merge them. TENSORRT_INCLUDE_DIR: see cmake/TensorRT.cmake.
GCOVR = .venv-gcovr/bin/gcovr --root custom_ops --exclude custom_ops/tests/ --exclude-throw-branches \
	--exclude-unreachable-branches --print-summary
coverage-cpp: $(VENV)/installed .venv-gcovr/installed
	$(call build_cpp,build/coverage,-DNNORM_COVERAGE=ON -DNNORM_CUDA=OFF)
	find build/coverage -name '*.gcda' -delete
	$(WITH_BIN) ctest --test-dir build/coverage --parallel 2 --output-on-failure --no-tests=error
	$(GCOVR) --json build/coverage/coverage.json build/coverage
	$(GCOVR) --txt-metric branch --add-tracefile build/coverage/coverage.json
	$(GCOVR) --txt-metric branch --add-tracefile build/coverage/coverage.json --merge-lines

notebooks: $(VENV)/installed
	$(BIN)/python scripts/run_notebooks.py

docs-links: $(VENV)/installed
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b linkcheck docs build/docs-links

pictures: $(VENV)/installed
	$(BIN)/python docs/pictures/draw.py

# make test-gpu, make bench-gpu    the tests and benchmarks that need a GPU; with compute-sanitizer if it is installed. On
#              other machines each part says why it is skipped. bench-gpu starts no measurement after SECONDS=480
.PHONY: test-gpu bench-gpu
# For machines without a network, GPU_PYTHON names an existing environment with the package's dependencies and its extra
# `test-gpu`. Nothing is installed then: nvcc, CMake and Ninja are taken from the PATH, ONNX Runtime's headers from
# ONNXRUNTIME_INCLUDE_DIR, the package from this folder and its kernels from build/gpu.
GPU := $(if $(shell nvidia-smi -L 2>/dev/null),native)
ifdef GPU_PYTHON
RUN_ON_GPU = NNORM_EXPORT_LIBRARY="$(CURDIR)/build/gpu/libnnorm_ort.so" \
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON)
else
GPU_ENVIRONMENT := $(if $(GPU),.venv-gpu,$(VENV))
GPU_INSTALLED := $(VENV)/installed $(GPU_ENVIRONMENT)/installed $(NVCC)
RUN_ON_GPU = $(GPU_ENVIRONMENT)/bin/python
endif
build_for_gpu = $(call build_cpp,build/gpu,$(if $(GPU),-DNNORM_CUDA=ON) -DNNORM_CUDA_ARCHITECTURES=$(or $(GPU),90))

test-gpu: $(GPU_INSTALLED)
	$(build_for_gpu)
	$(WITH_BIN) ctest --test-dir build/gpu --output-on-failure --no-tests=ignore -R gpu
	for tool in memcheck racecheck initcheck; do \
		if command -v compute-sanitizer && test -n "$(GPU)"; then \
			compute-sanitizer --tool $$tool --error-exitcode 1 build/gpu/test_cuda_kernels_gpu \
				$$(test $$tool != racecheck || echo 20000 7) || exit 1; \
		else echo "compute-sanitizer's $$tool is skipped: there is no compute-sanitizer, or no GPU"; fi; done
	if test -n "$(GPU)"; then $(RUN_ON_GPU) -m pytest tests/gpu tests/layers/test_fused_on_gpu.py; else echo "tests/gpu is skipped: there is no GPU"; fi

bench-gpu: SECONDS := 480
bench-gpu: $(GPU_INSTALLED)
	$(build_for_gpu)
	if test -n "$(GPU)"; then build/gpu/bench_kernels_gpu | tee build/gpu/bench.txt && \
		$(RUN_ON_GPU) -m benchmarks.gpu.records build/gpu/bench.txt && \
		$(RUN_ON_GPU) -m benchmarks.gpu --seconds $(SECONDS) --write; \
	else echo "skipped: there is no GPU to measure"; fi
