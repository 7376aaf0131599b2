# Wheels and the source distribution.

# make wheels  the source distribution, and from it the wheels for any Linux on x86-64 and AArch64, with the kernels for
#              processors: in dist/
# make test-wheels    looks at them, and builds them twice, into the same bytes
.PHONY: sdist wheel wheels test-wheels same-bits-zig
# The same sources give the same files: their date is the commit's.
SOURCE_DATE_EPOCH ?= $(or $(shell git log -1 --format=%ct 2>/dev/null),0)
sdist wheel wheels-%: export SOURCE_DATE_EPOCH := $(SOURCE_DATE_EPOCH)

wheel: $(VENV)/installed $(NVCC)
	rm -rf build/wheel
	NNORM_CUDA=ON $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(WITH_BIN) auditwheel repair --exclude libtensorrt_rtx.so.1 --wheel-dir dist build/wheel/*.whl

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
	$(WITH_BIN) $(ZIG_CACHE) _PYTHON_HOST_PLATFORM=linux-$* NNORM_CUDA=OFF NNORM_EXPORT_BUILD_LIBRARY=1 \
		$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir --wheel-dir build/wheels/$* \
		--config-settings=build-dir="$(CURDIR)/build/wheels/$*/build" --config-settings=install.strip=false \
		--config-settings=wheel.reproducible=true --config-settings=cmake.define.NNORM_WERROR=ON \
		--config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE=cmake/zig_toolchain.cmake \
		--config-settings=cmake.define.NNORM_ZIG=$(ZIG) --config-settings=cmake.define.NNORM_ZIG_TARGET=$*-linux-gnu.2.28 \
		build/sdist/*.tar.gz
	$(WITH_BIN) auditwheel repair --wheel-dir build/wheels/$*/repaired build/wheels/$*/*.whl
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
	NNORM_WHEELS="$(CURDIR)/build/wheels" $(PYTEST) tests/project/test_wheels.py
	if test "$$(uname -m)" = x86_64; then $(MAKE) same-bits-zig; fi

# make test-windows    the libraries for Windows, compiled by Zig: what they export, and that they need Windows alone. Nothing runs them
.PHONY: test-windows
test-windows: $(VENV)/installed .venv-neon/installed
	$(WITH_BIN) $(ZIG_CACHE) cmake -S custom_ops -B build/windows -G Ninja --toolchain cmake/zig_toolchain.cmake \
		-DNNORM_ZIG=$(ZIG) -DNNORM_ZIG_TARGET=x86_64-windows-gnu -DNNORM_CUDA=OFF -DNNORM_WERROR=ON
	MAKEFLAGS= $(WITH_BIN) $(ZIG_CACHE) cmake --build build/windows
	NNORM_WINDOWS_LIBRARIES="$(CURDIR)/build/windows" $(PYTEST) tests/project/test_windows_libraries.py

same-bits-zig: N ?= 400000
same-bits-zig: build/cpp/test_same_bits .venv-neon/installed
	$(call build_with_zig,build/zig-x86_64,x86_64-linux-gnu.2.28,test_same_bits test_quantized_batch_normal_norm)
	build/zig-x86_64/test_quantized_batch_normal_norm
	build/cpp/test_same_bits $(N) | grep '^digest' > build/zig-x86_64/native.txt
	build/zig-x86_64/test_same_bits $(N) | grep '^digest' | diff build/zig-x86_64/native.txt -
