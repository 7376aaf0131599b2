# nnorm_trt: the TensorRT plugins; nnorm_trt_register: a library that registers them when it is loaded. Both need a CUDA
# compiler and TensorRT's headers.
#
# TENSORRT_INCLUDE_DIR (a CMake variable, else from the environment) is the folder of NvInferRuntime.h; by default the usual
# places are searched. nnorm_trt is one binary for TensorRT 10 and 11; nnorm_trt_register is for the major version of the
# headers, which is part of its name.

if(NOT DEFINED TENSORRT_INCLUDE_DIR AND NOT "$ENV{TENSORRT_INCLUDE_DIR}" STREQUAL "")
  set(TENSORRT_INCLUDE_DIR "$ENV{TENSORRT_INCLUDE_DIR}")
endif()

if(NOT "${TENSORRT_INCLUDE_DIR}" STREQUAL "")
  # The user named it: use this folder or fail.
  if(NOT EXISTS "${TENSORRT_INCLUDE_DIR}/NvInferRuntime.h")
    message(FATAL_ERROR
      "nnorm_export: TENSORRT_INCLUDE_DIR is '${TENSORRT_INCLUDE_DIR}', which does not contain NvInferRuntime.h. Set it to "
      "the folder that contains this file, or unset the variable.")
  endif()
  set(directory "${TENSORRT_INCLUDE_DIR}")
else()
  unset(directory)
  find_path(directory NvInferRuntime.h NO_CACHE
    PATHS /usr/local/tensorrt /opt/tensorrt /usr/local/TensorRT /opt/TensorRT /usr/local/cuda
    PATH_SUFFIXES include include/x86_64-linux-gnu include/aarch64-linux-gnu)
  if(NOT directory)
    message(STATUS "TensorRT: plugins not built, NvInferRuntime.h was not found; set TENSORRT_INCLUDE_DIR to its folder")
    return()
  endif()
endif()

file(STRINGS "${directory}/NvInferVersion.h" lines REGEX "^#define (NV_TENSORRT|TRT)_MAJOR(_ENTERPRISE)? [0-9]+")
string(REGEX MATCH "[0-9]+" NNORM_TENSORRT_MAJOR "${lines}")
if(NOT NNORM_TENSORRT_MAJOR MATCHES "^(10|11)$")
  message(FATAL_ERROR
    "nnorm_export: the headers in '${directory}' are those of TensorRT ${NNORM_TENSORRT_MAJOR}; 10 or 11 is needed. Set "
    "TENSORRT_INCLUDE_DIR to the headers of one of these.")
endif()
message(STATUS "TensorRT: headers of version ${NNORM_TENSORRT_MAJOR} in ${directory}")
add_library(tensorrt_headers INTERFACE)
target_include_directories(tensorrt_headers SYSTEM INTERFACE "${directory}")

if(NOT TARGET nnorm_cuda_kernels)
  message(STATUS "TensorRT: plugins not built, they need nvcc")
  return()
endif()

set(folder "${CMAKE_CURRENT_SOURCE_DIR}/tensorrt")
nnorm_add_plugin(nnorm_trt "${folder}" "${folder}/library.cpp" "${folder}/operation.cpp" "${folder}/plugin.cpp")
target_link_libraries(nnorm_trt PRIVATE nnorm_cuda_kernels tensorrt_headers)

add_library(nnorm_trt_register SHARED "${folder}/register.cpp")
target_link_libraries(nnorm_trt_register PRIVATE
  nnorm_options nnorm_trt tensorrt_headers CUDA::toolkit ${CMAKE_DL_LIBS})
set_target_properties(nnorm_trt_register PROPERTIES OUTPUT_NAME nnorm_trt_register_${NNORM_TENSORRT_MAJOR}
  BUILD_RPATH "$ORIGIN" INSTALL_RPATH "$ORIGIN")
install(TARGETS nnorm_trt_register LIBRARY DESTINATION nnorm_export/lib COMPONENT python)
