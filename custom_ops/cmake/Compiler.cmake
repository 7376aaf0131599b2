# Finds a C++17 compiler and defines the target nnorm_options: the options of all C++ code.

# CMake's own error for a missing compiler has no remedy, so this checks first.
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  unset(CMAKE_CXX_COMPILER CACHE) # so that the next configuration of this folder looks again
  if(DEFINED ENV{CXX})
    set(looked "The environment variable CXX says '$ENV{CXX}', which is not a working C++ compiler.")
  else()
    set(looked "No working C++ compiler was found.")
  endif()
  message(FATAL_ERROR
    "nnorm_export: ${looked} "
    "The kernels for ONNX Runtime are C++ and are compiled during installation. Either\n"
    "  - install a compiler: 'apt install g++', 'dnf install gcc-c++' or 'xcode-select --install', or set "
    "the environment variable CXX to yours; or\n"
    "  - install without the kernels, which are an optimization: set the environment variable "
    "NNORM_EXPORT_BUILD_LIBRARY=0 and install again.")
endif()
enable_language(CXX)

if(NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  message(FATAL_ERROR
    "nnorm_export: the kernels need GCC or Clang; this compiler is ${CMAKE_CXX_COMPILER_ID}. Set the environment variable "
    "CXX to one of these, or install without the kernels: NNORM_EXPORT_BUILD_LIBRARY=0.")
endif()

if(WIN32 AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  message(FATAL_ERROR
    "nnorm_export: GCC for Windows does not align AVX's registers on the stack (its bug 54412), so its kernels would crash. "
    "Set the environment variable CXX to a Clang, or install without the kernels: NNORM_EXPORT_BUILD_LIBRARY=0.")
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release by default: these are kernels" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON) # for editors and clang-tidy
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# Other programs load the library: it exports one symbol, and hides its copies of templates.
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

# -ffp-contract=off: only the formulas decide where products and sums are fused, so that all processors compute the same
# bits (tests/test_same_bits.cpp) and tests draw the same numbers.
add_library(nnorm_options INTERFACE)
target_compile_features(nnorm_options INTERFACE cxx_std_17)
target_compile_options(nnorm_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
target_compile_options(nnorm_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra $<$<BOOL:${NNORM_WERROR}>:-Werror>>)
if(NNORM_SANITIZE)
  set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all)
  if(NOT NNORM_SANITIZE STREQUAL "ALL")
    # AddressSanitizer detects the accesses that these checks announce. Without them compiling takes two thirds of the time.
    list(APPEND sanitizers -fno-sanitize=null,object-size,pointer-overflow,vptr)
  endif()
  # -O1, after the build type's -O3: sanitized code is not vectorized anyway, and compiles in a quarter of the time. -g1
  # is enough for the lines in a report.
  set(NNORM_SANITIZE_FLAGS -O1 -g1 -fno-omit-frame-pointer)
  target_compile_options(nnorm_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${sanitizers} ${NNORM_SANITIZE_FLAGS}>)
  target_link_options(nnorm_options INTERFACE ${sanitizers})
endif()
if(NNORM_COVERAGE)
  # -O1, after the build type's -O3, which merges and removes branches; -O0 takes four times as long.
  target_compile_options(nnorm_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:--coverage -O1 -fno-inline>)
  target_link_options(nnorm_options INTERFACE --coverage)
endif()
if(NNORM_SANITIZE OR NNORM_COVERAGE)
  set(NNORM_INSTRUMENTED ON) # the code is not vectorized, and slower
endif()
