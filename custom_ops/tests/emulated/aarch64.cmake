# Compiles for Linux on AArch64 with the compiler of the package `ziglang` (Clang, with its C and C++ libraries), for run.py:
#
#   cmake -S custom_ops -B build/neon --toolchain tests/emulated/aarch64.cmake -DNNORM_ZIG=…/ziglang/zig
#
# The names of options are Clang's. Zig is one program for all tools; CMake wants a program for each.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES NNORM_ZIG)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY) # Zig would compile its libraries without optimisation too, to link them
set(CMAKE_CXX_COMPILER "${NNORM_ZIG}" c++ --target=aarch64-linux-musl)
set(folder "${CMAKE_BINARY_DIR}/zig")
foreach(tool ar ranlib)
  string(TOUPPER "${tool}" TOOL)
  file(WRITE "${folder}/${tool}" "#!/bin/sh\nexec '${NNORM_ZIG}' ${tool} \"$@\"\n")
  file(CHMOD "${folder}/${tool}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  set(CMAKE_${TOOL} "${folder}/${tool}")
  set(CMAKE_CXX_COMPILER_${TOOL} "${folder}/${tool}")
endforeach()
