# A C++17 compiler, and the options that everything here is compiled with: target nnorm_options.

# CMake's own error where there is no compiler says nothing of what to do, so look for one before it does.
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  unset(CMAKE_CXX_COMPILER CACHE) # else a build folder that is kept would not look again
  if(DEFINED ENV{CXX})
    set(looked "The environment variable CXX says '$ENV{CXX}', which is no working C++ compiler.")
  else()
    set(looked "No working C++ compiler was found.")
  endif()
  message(FATAL_ERROR
    "nnorm_export: ${looked} "
    "Its kernels for ONNX Runtime are C++ and are compiled on installation. Either\n"
    "  - install a compiler: 'apt install g++', 'dnf install gcc-c++' or 'xcode-select --install', or name yours "
    "in the environment variable CXX; or\n"
    "  - install without the kernels, which are an optimisation: set the environment variable "
    "NNORM_EXPORT_BUILD_LIBRARY=0 and install again.")
endif()
enable_language(CXX)

if(NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  message(FATAL_ERROR
    "nnorm_export: its kernels are written for GCC and Clang; this compiler is ${CMAKE_CXX_COMPILER_ID}. Name another "
    "in the environment variable CXX, or install without the kernels: NNORM_EXPORT_BUILD_LIBRARY=0.")
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release unless told otherwise: these are kernels" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON) # for editors and clang-tidy
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# The library lives in other people's processes: it shows them one symbol and keeps its copies of templates to itself.
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

add_library(nnorm_options INTERFACE)
target_compile_features(nnorm_options INTERFACE cxx_std_17)
target_compile_options(nnorm_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra $<$<BOOL:${NNORM_WERROR}>:-Werror>>)
if(NNORM_SANITIZE)
  set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all)
  # -O1, after the build type's -O3: sanitized code is not vectorised anyway, and compiles in a quarter of the time. -g1 is
  # enough for the lines in a report.
  set(NNORM_SANITIZE_FLAGS -O1 -g1 -fno-omit-frame-pointer)
  target_compile_options(nnorm_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${sanitizers} ${NNORM_SANITIZE_FLAGS}>)
  target_link_options(nnorm_options INTERFACE ${sanitizers})
endif()
