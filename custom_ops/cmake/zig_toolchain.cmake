# Compiles for Linux, or for Windows, with the compiler of the package `ziglang`: a Clang that links its C++ library
# statically, and can link against any version of glibc.
#
#   cmake -S custom_ops -B build/zig --toolchain cmake/zig_toolchain.cmake -DNNORM_ZIG=…/ziglang/zig \
#     -DNNORM_ZIG_TARGET=x86_64-linux-gnu.2.28    # or aarch64-linux-musl, for tests/emulated/run.py; x86_64-windows-gnu
#
# Options have Clang's names. Zig is one program for all tools; CMake needs a program for each.
set(CMAKE_SYSTEM_NAME Linux)
if(NNORM_ZIG_TARGET MATCHES "-windows-")
  set(CMAKE_SYSTEM_NAME Windows)
endif()
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${NNORM_ZIG_TARGET}")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES NNORM_ZIG NNORM_ZIG_TARGET)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY) # else Zig compiles its libraries without optimization too
# Zig's libraries have debugging symbols, and this machine's strip may not know the other processor.
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(folder "${CMAKE_BINARY_DIR}/zig")
foreach(tool ar ranlib)
  string(TOUPPER "${tool}" TOOL)
  file(WRITE "${folder}/${tool}" "#!/bin/sh\nexec '${NNORM_ZIG}' ${tool} \"$@\"\n")
  set(CMAKE_${TOOL} "${folder}/${tool}")
  set(CMAKE_CXX_COMPILER_${TOOL} "${folder}/${tool}")
endforeach()
# Clang's -march=x86-64-v3 is Zig's -march=x86_64_v3.
file(WRITE "${folder}/c++" "#!/bin/sh
for argument; do
  shift
  case $argument in -march=x86-64-v*) argument=-march=x86_64_\${argument##*-} ;; esac
  set -- \"$@\" \"$argument\"
done
exec '${NNORM_ZIG}' c++ --target=${NNORM_ZIG_TARGET} \"$@\"
")
file(CHMOD "${folder}/ar" "${folder}/ranlib" "${folder}/c++" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
set(CMAKE_CXX_COMPILER "${folder}/c++")
