# nnorm_cuda_kernels: the CUDA kernels, cuda/kernels.cu compiled once for each type of tensor.
#
# NNORM_CUDA (a CMake variable, else from the environment) is ON (fail if nvcc is not found), OFF or AUTO (default):
# build if nvcc is found, and this machine has a GPU or the next variable is set. CUDACXX names nvcc; otherwise the PATH
# and /usr/local/cuda are searched.
# NNORM_CUDA_ARCHITECTURES (likewise) lists the GPUs to build for, as CMake writes them: "90" or
# "80-real;90-real;90-virtual". The default with ON is all GPUs; with AUTO it is those of this machine, because each
# takes minutes and a user may have nvcc for other purposes.

include(Gpus)
foreach(name NNORM_CUDA NNORM_CUDA_ARCHITECTURES)
  if(NOT DEFINED ${name} AND NOT "$ENV{${name}}" STREQUAL "")
    set(${name} "$ENV{${name}}")
  endif()
endforeach()
if("${NNORM_CUDA}" STREQUAL "")
  set(NNORM_CUDA AUTO)
endif()
string(TOUPPER "${NNORM_CUDA}" NNORM_CUDA)

set(gpus "")
if(NNORM_CUDA STREQUAL "AUTO")
  if("${NNORM_CUDA_ARCHITECTURES}" STREQUAL "")
    nnorm_find_gpus(gpus reason 10)
    if("${gpus}" STREQUAL "")
      message(STATUS "CUDA: not built, no GPU was found (${reason}); NNORM_CUDA=ON builds the kernels for all GPUs, with nvcc")
      return()
    endif()
  endif()
elseif(NOT NNORM_CUDA)
  message(STATUS "CUDA: not built, NNORM_CUDA is ${NNORM_CUDA}")
  return()
endif()

# CMake tests the compiler with an architecture; every nvcc since 10 knows this one.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 75)
endif()
if(NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
  set(ENV{PATH} "$ENV{PATH}:/usr/local/cuda/bin")
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE) # so that the next configuration of this folder looks again
  if(NNORM_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA: not built, nvcc was not found; set CUDACXX to it")
    return()
  endif()
  message(FATAL_ERROR
    "nnorm_export: NNORM_CUDA is ${NNORM_CUDA}, but no working nvcc was found. Install the CUDA toolkit, or set "
    "the environment variable CUDACXX to its nvcc, or build without CUDA kernels: NNORM_CUDA=OFF.")
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED) # the toolkit of this compiler

if("${NNORM_CUDA_ARCHITECTURES}" STREQUAL "")
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch OUTPUT_VARIABLE output)
  string(REGEX MATCHALL "compute_[0-9]+\n" known "${output}")
  string(REGEX REPLACE "compute_|\n" "" known "${known}")
  if(NOT "${gpus}" STREQUAL "")
    nnorm_architectures_of_gpus(NNORM_CUDA_ARCHITECTURES left_out "${gpus}" "${known}")
    foreach(gpu IN LISTS left_out)
      string(REGEX REPLACE "(.)$" ".\\1" gpu "${gpu}")
      message(STATUS "CUDA: nvcc ${CMAKE_CUDA_COMPILER_VERSION} does not compile the kernels for compute capability ${gpu}")
    endforeach()
    if("${NNORM_CUDA_ARCHITECTURES}" STREQUAL "")
      message(STATUS "CUDA: not built; NNORM_CUDA=ON builds the kernels for other GPUs than this machine's")
      return()
    endif()
  else()
    # Machine code for each generation that this compiler knows, and PTX of the last one for later generations.
    foreach(architecture 75 80 86 89 90 100 110 120)
      if(architecture IN_LIST known)
        list(APPEND NNORM_CUDA_ARCHITECTURES ${architecture}-real)
        set(newest ${architecture})
      endif()
    endforeach()
    list(APPEND NNORM_CUDA_ARCHITECTURES ${newest}-virtual)
  endif()
endif()
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER_VERSION}, for ${NNORM_CUDA_ARCHITECTURES}")

add_library(nnorm_cuda_kernels INTERFACE)
target_include_directories(nnorm_cuda_kernels INTERFACE "${CMAKE_CURRENT_SOURCE_DIR}/include")
# The static runtime, so that the library loads without libcudart.
target_link_libraries(nnorm_cuda_kernels INTERFACE CUDA::cudart_static)
# The object library `target`: the kernels for one type of tensor.
function(nnorm_add_cuda_kernels target type architectures)
  add_library(${target} OBJECT "${CMAKE_CURRENT_SOURCE_DIR}/cuda/kernels.cu")
  target_compile_definitions(${target} PRIVATE NNORM_TYPE=${type} NNORM_INSTRUCTION_SET=cuda)
  target_compile_features(${target} PRIVATE cuda_std_17)
  # -fmad=false: as in Compiler.cmake, only the formulas decide what is fused.
  target_compile_options(${target} PRIVATE -fmad=false $<$<BOOL:${NNORM_WERROR}>:-Werror=all-warnings>)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13) # 12.8 has it, but its result needs a newer driver than 12
    target_compile_options(${target} PRIVATE --compress-mode=size) # a sixth of the size
  endif()
  target_include_directories(${target} PRIVATE include)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${architectures}" CUDA_VISIBILITY_PRESET hidden)
endfunction()

foreach(type float double nnorm::Float16 nnorm::BFloat16)
  string(REPLACE "::" "_" name "nnorm_cuda_${type}")
  nnorm_add_cuda_kernels(${name} ${type} "${NNORM_CUDA_ARCHITECTURES}")
  target_sources(nnorm_cuda_kernels INTERFACE $<TARGET_OBJECTS:${name}>)
endforeach()
