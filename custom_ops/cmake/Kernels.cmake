# nnorm_kernels: cpu/instruction_set.cpp compiled once for each instruction set, and the other files in cpu/.
#
# dispatch.cpp chooses one of them on the machine that runs the library. NNORM_HAVE_… defines which ones there are.
# instruction_set.cpp must not emit an inline function whose name lacks the instruction set, such as one of the standard
# library: the linker keeps one copy of it, which may be the one with AVX-512.

# The flags of instruction_set.cpp for every instruction set; -DNNORM_KERNEL_FLAGS="…;…" replaces them. They are not in
# CMake's cache, so that an edit here reaches existing build folders. -ffast-math is not among them: infinities, NaN and
# signed zeros must be those of the formulas.
if(NOT DEFINED NNORM_KERNEL_FLAGS)
  set(NNORM_KERNEL_FLAGS -fno-math-errno -fno-trapping-math -fopenmp-simd)
  if(NOT NNORM_INSTRUMENTED) # else the flags of Compiler.cmake
    list(APPEND NNORM_KERNEL_FLAGS -O3)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT NNORM_INSTRUMENTED) # 3 to 10 % faster; other compilers do so by default
    list(APPEND NNORM_KERNEL_FLAGS -funroll-loops --param=max-unroll-times=4 -fschedule-insns -fsched-pressure)
    # Partial redundancy elimination would select among intermediate results where the formulas select an operand.
    list(APPEND NNORM_KERNEL_FLAGS -fno-tree-pre)
    list(APPEND NNORM_KERNEL_FLAGS -DNNORM_HIDE_BOUNDS) # mathematics.h says why
  endif()
endif()

include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)
# The compiler decides, not this machine: it may be a cross compiler.
check_cxx_source_compiles("#ifndef __x86_64__\n#error\n#endif\nint main() {}" NNORM_IS_X86_64)
check_cxx_source_compiles("#ifndef __aarch64__\n#error\n#endif\nint main() {}" NNORM_IS_AARCH64)

add_library(nnorm_kernels STATIC)
file(GLOB kernel_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cpu/*.cpp")
list(FILTER kernel_sources EXCLUDE REGEX "/instruction_set\\.cpp$")
target_sources(nnorm_kernels PRIVATE ${kernel_sources})
target_include_directories(nnorm_kernels PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}/include")
target_link_libraries(nnorm_kernels PUBLIC nnorm_options)

# nnorm_compile_for(avx2 target file) compiles a file for an instruction set that was added.
function(nnorm_compile_for name target file)
  add_library(${target} OBJECT "${file}")
  target_compile_definitions(${target} PRIVATE NNORM_INSTRUCTION_SET=${name})
  target_compile_options(${target} PRIVATE ${NNORM_KERNEL_FLAGS} ${NNORM_FLAGS_FOR_${name}})
  target_include_directories(${target} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/include")
  target_link_libraries(${target} PRIVATE nnorm_options)
endfunction()

# nnorm_add_instruction_set(avx2 -march=…) adds instruction_set.cpp compiled with these flags, if the compiler knows
# them.
function(nnorm_add_instruction_set name)
  string(TOUPPER "${name}" NAME)
  if(ARGN)
    string(REPLACE ";" " " flags "${ARGN}")
    check_cxx_compiler_flag("${flags}" NNORM_COMPILER_KNOWS_${NAME})
    if(NOT NNORM_COMPILER_KNOWS_${NAME})
      message(STATUS "Kernels: ${name} not built, this compiler does not know ${flags}; use a newer compiler")
      return()
    endif()
  endif()
  message(STATUS "Kernels: ${name}")
  set(NNORM_FLAGS_FOR_${name} ${ARGN} PARENT_SCOPE)
  set(NNORM_FLAGS_FOR_${name} ${ARGN})
  set(NNORM_INSTRUCTION_SETS ${NNORM_INSTRUCTION_SETS} ${name} PARENT_SCOPE)
  nnorm_compile_for(${name} nnorm_kernels_${name} "${CMAKE_CURRENT_SOURCE_DIR}/cpu/instruction_set.cpp")
  target_sources(nnorm_kernels PRIVATE $<TARGET_OBJECTS:nnorm_kernels_${name}>)
  target_compile_definitions(nnorm_kernels PUBLIC NNORM_HAVE_${NAME}) # PUBLIC: the tests run each of them
endfunction()

if(NNORM_IS_AARCH64)
  nnorm_add_instruction_set(neon) # every AArch64 processor has it
else()
  nnorm_add_instruction_set(baseline)
endif()
if(NNORM_IS_X86_64)
  set(NNORM_AVX2_FLAGS -march=x86-64-v3)
  nnorm_add_instruction_set(avx2 ${NNORM_AVX2_FLAGS})
  # By default compilers use vectors of 256 bits here, because wide ones lower the clock; these kernels are faster with 512.
  nnorm_add_instruction_set(avx512 -march=x86-64-v4 -mprefer-vector-width=512)
endif()
