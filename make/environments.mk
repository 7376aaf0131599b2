# The environments: .venv, in which most targets run, and .venv-NAME for what must be apart. requirements/NAME.txt pins the
# packages of each for Python 3.10 to 3.14.

# make environments    installs everything that `make test-all` uses; --jobs 2 overlaps the installations
# make lock    pins the packages anew: requirements/NAME.in says what an environment needs. LOCK=--upgrade takes the newest
#              versions, LOCK='zoo ray' pins these two
# make test TORCH=torch==2.14.1    another PyTorch in .venv; by default that of requirements/test.txt, a CPU build where pip finds one
# make test TORCH_INDEX=    pip's own index alone; by default PyTorch's index of CPU builds is asked too, if it can be reached

# Every other ONNX Runtime has its own environment. 1.18 is the oldest that files and kernels must run on; it has wheels up to
# Python 3.12. `gpu` is onnxruntime-gpu, which loads the CUDA library on machines without a GPU too.
OLDEST := 1.18
VERSIONS := $(OLDEST) 1.20 1.22 1.24 1.27 gpu
IN_TEST := $(OLDEST) gpu
# The interpreter of an environment, if ONNX Runtime could be installed into it.
interpreter = $(shell test -s .venv-onnxruntime-$(1)/installed && echo "$(CURDIR)/.venv-onnxruntime-$(1)/bin/python")

# NVIDIA's wheels of TensorRT-RTX are for Linux (and Windows).
RTX_VERSIONS := 1.7
RTX := $(if $(filter Linux,$(shell uname -s)),$(RTX_VERSIONS))

# The environments of the matrix of runtimes. The quick ones run in `make test-all`. Node.js and its packages are used where npm is.
NPM := $(if $(shell command -v npm),node)
# An OpenCV of 2023, which takes NumPy 1, as nvidia-pytriton does below.
OLDER_OPENCV := $(shell $(PYTHON) -c 'import sys; print("opencv4.8" * (sys.version_info < (3, 13)))')
EVERYWHERE := onnxruntime onnxruntime-openvino opencv5 opencv4 $(OLDER_OPENCV) tract iree tvm executorch litert $(NPM)
EVERYWHERE_IN_TEST := opencv5 tract $(NPM)

# nvidia-pytriton has a tritonserver for Linux on x86-64; it takes NumPy 1, which has wheels up to Python 3.12.
TRITON := $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),$(shell $(PYTHON) -c 'import sys; print("triton" * (sys.version_info < (3, 13)))'))

# Triton, the compiler, has wheels for Linux.
TRITON_COMPILER := $(if $(filter Linux,$(shell uname -s)),triton-compiler)

# The kernels for GPUs are compiled by the machine's nvcc or, where it has none, by the one on PyPI.
# A make that this one calls finds the CUDACXX below in its environment.
SYSTEM_NVCC := $(or $(if $(findstring .venv-nvcc/,$(CUDACXX)),,$(CUDACXX)),$(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null))
ifeq ($(SYSTEM_NVCC)$(filter-out Linux,$(shell uname -s)),)
NVCC := .venv-nvcc/installed
export CUDACXX := $(CURDIR)/.venv-nvcc/cuda/bin/nvcc
endif

# The folder for ONNX Runtime's headers, which are downloaded once for all builds.
export NNORM_DOWNLOAD_CACHE ?= $(CURDIR)/build/downloads

.PHONY: environments lock
environments: $(VENV)/installed .venv-zoo/installed .venv-neon/installed .venv-ray/installed .venv-tools/installed $(NVCC) \
	$(TRITON:%=.venv-%/installed) $(TRITON_COMPILER:%=.venv-%/installed) $(IN_TEST:%=.venv-onnxruntime-%/installed) $(RTX:%=.venv-tensorrt-rtx-%/installed) \
	$(EVERYWHERE_IN_TEST:%=.venv-everywhere-%/installed)

# The sources of the library. The installation compiles it.
LIBRARY_SOURCES := custom_ops/CMakeLists.txt $(wildcard $(addprefix custom_ops/,cmake/* include/nnorm/* cpu/* cuda/* onnxruntime/* onnxruntime/*/* tensorrt/*))
.venv/installed .venv-newest/installed .venv-gpu/installed: pyproject.toml scripts/install.py $(LIBRARY_SOURCES)
INSTALL = bin/python scripts/install.py $(if $(TORCH),--torch '$(TORCH)') $(if $(filter-out undefined,$(origin TORCH_INDEX)),--torch-index '$(TORCH_INDEX)')

.venv/installed: requirements/test.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/$(INSTALL) --extra test --constraint $<
	touch $@

# The newest version of everything, from pip's own choice. It builds the same kernels in the same folder as .venv.
.venv-newest/installed: | .venv/installed
	$(PYTHON) -m venv $(@D)
	$(@D)/$(INSTALL) --extra test
	touch $@

.venv-gpu/installed: requirements/gpu.txt | .venv/installed $(NVCC)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python scripts/install.py --torch-index '' --extra test-gpu --constraint $<
	touch $@

# All others have what their file lists. --no-compile: Python compiles the modules that are imported; ray has thousands more.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# This rule first: GNU make 3.81 takes the first pattern that fits.
.venv-onnxruntime-%/installed: requirements/onnxruntime-%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --no-deps --requirement $<
	if $(@D)/bin/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("onnxruntime"))'; then \
		$(@D)/bin/python -c 'import onnxruntime' && echo $* > $@; else \
		echo "ONNX Runtime $* has no wheel for this Python: what needs it is left out" >&2; touch $@; fi
.venv-%/installed: requirements/%.txt | .venv/installed
	.venv/bin/python -m venv $(@D)
	if grep -q 'On top of .venv' requirements/$*.in; then $(call take_packages,$(@D)); fi
	$(@D)/bin/python $(PIP_INSTALL) --no-deps --requirement $<
	touch $@
# $(call take_packages,ENVIRONMENT): all other packages come from .venv.
take_packages = .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"

# The packages have the folders of an installed CUDA toolkit, except two links that CMake looks for.
.venv-nvcc/installed: requirements/nvcc.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --no-deps --requirement $<
	ln -sfn "$$($(@D)/bin/python -c "import nvidia; print(nvidia.__path__[0])")/cu13" $(@D)/cuda
	ln -sfn lib $(@D)/cuda/lib64
	ln -sfn libcudart.so.13 $(@D)/cuda/lib/libcudart.so
	touch $@

# Zig compiles its C and C++ libraries for AArch64 with the first program, in a minute, and keeps them.
.venv-neon/installed: export ZIG_GLOBAL_CACHE_DIR = $(CURDIR)/.venv-neon/zig
.venv-neon/installed: requirements/neon.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --no-deps --requirement $<
	printf '#include <string>\nint main(int, char** v) { return int(std::stoul(*v)); }' | \
		$(@D)/bin/python -m ziglang c++ --target=aarch64-linux-musl -O3 -DNDEBUG -std=c++17 -fPIC -x c++ - -o $(@D)/first
	touch $@

# --ignore-scripts: the one of onnxruntime-node downloads libraries for CUDA.
.venv-everywhere-node/installed: requirements/everywhere-node/package.json requirements/everywhere-node/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund --loglevel error
	touch $@

.venv-uv/installed: requirements/uv.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --requirement $<
	touch $@
lock: .venv-uv/installed
	PATH="$(CURDIR)/.venv-uv/bin:$$PATH" .venv-uv/bin/python scripts/lock.py $(LOCK)
	$(if $(NPM),npm install --prefix requirements/everywhere-node --package-lock-only --ignore-scripts --no-audit --no-fund \
		--omit-lockfile-registry-resolved)
