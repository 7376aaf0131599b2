# nnorm_trt: the TensorRT plugins; nnorm_trt_register and, for TensorRT-RTX, nnorm_trt_register_rtx: libraries that register
# them when they are loaded. All need nnorm_cuda_kernels and TensorRT's headers.
#
# TENSORRT_INCLUDE_DIR (a CMake variable, else from the environment) is the folder of NvInferRuntime.h; by default the usual
# places are searched. nnorm_trt is one binary for TensorRT 10, 11 and TensorRT-RTX; nnorm_trt_register is for the major
# version of the headers, which is part of its name. TensorRT-RTX whose parser takes plugins (1.7 on) needs those of 11.

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
  message(STATUS "TensorRT: plugins not built, they need the kernels for GPUs; NNORM_CUDA=ON builds both")
  return()
endif()

set(folder "${CMAKE_CURRENT_SOURCE_DIR}/tensorrt")
nnorm_add_plugin(nnorm_trt "${folder}" "${folder}/library.cpp" "${folder}/operation.cpp" "${folder}/plugin.cpp")
target_link_libraries(nnorm_trt PRIVATE nnorm_cuda_kernels tensorrt_headers ${CMAKE_DL_LIBS})

function(nnorm_add_registering_library name output_name)
  add_library(${name} SHARED "${folder}/register.cpp")
  target_link_libraries(${name} PRIVATE nnorm_options nnorm_trt tensorrt_headers CUDA::toolkit ${CMAKE_DL_LIBS})
  # A library that is loaded again after dlclose() would register the plugins again.
  target_link_options(${name} PRIVATE "LINKER:-z,nodelete")
  # The build folder's library searches only $ORIGIN too: the stub below must not be loaded.
  set_target_properties(${name} PROPERTIES OUTPUT_NAME ${output_name} BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
  set_property(GLOBAL APPEND PROPERTY NNORM_LIBRARIES ${name}) # for Sbom.cmake
  install(TARGETS ${name} LIBRARY DESTINATION nnorm_export/lib COMPONENT python)
endfunction()
nnorm_add_registering_library(nnorm_trt_register nnorm_trt_register_${NNORM_TENSORRT_MAJOR})

# Its SONAME is that of a library that NVIDIA's wheels lack (see register.cpp), and it needs libtensorrt_rtx.so.1. The
# build links an empty library of that name instead, so that it needs no file of NVIDIA's.
file(CONFIGURE OUTPUT stub/empty.cpp CONTENT "")
add_library(tensorrt_rtx_stub SHARED "${CMAKE_CURRENT_BINARY_DIR}/stub/empty.cpp")
set_target_properties(tensorrt_rtx_stub PROPERTIES OUTPUT_NAME tensorrt_rtx SOVERSION 1
  LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/stub")
nnorm_add_registering_library(nnorm_trt_register_rtx nnorm_trt_register_rtx)
target_link_libraries(nnorm_trt_register_rtx PRIVATE tensorrt_rtx_stub)
target_link_options(nnorm_trt_register_rtx PRIVATE "LINKER:--no-as-needed" "LINKER:-soname,libtensorrt_rtx.so")
set_target_properties(nnorm_trt_register_rtx PROPERTIES NO_SONAME ON)
