# Every tests/*.cpp is a program of its own that exits with 0 when all is well. It may use the kernels, and load
# the library that the definition NNORM_ORT_LIBRARY names. But tests/*_target.cpp is compiled once for each
# instruction set, with the kernels' own flags, and linked into all of them.

# GPUs' kernels, for the processor.
add_library(nnorm_cuda_on_host INTERFACE)
target_compile_definitions(nnorm_cuda_on_host INTERFACE NNORM_CUDA_ON_HOST)
# `#pragma unroll` speaks to nvcc alone: without it other compilers compute the same, and would warn at each.
target_compile_options(nnorm_cuda_on_host INTERFACE -Wno-unknown-pragmas)
target_include_directories(nnorm_cuda_on_host INTERFACE
  "${CMAKE_CURRENT_SOURCE_DIR}/cuda" "${CMAKE_CURRENT_SOURCE_DIR}/tests/cuda_on_host")

# One more kind of kernel, which no library of ours runs: with the arithmetic of GPUs, to hold it to the same bounds.
# NNORM_AVX2_FLAGS: it needs fused multiplications, which GPUs have.
nnorm_add_kernel_target(device -DNNORM_CUDA_ON_HOST ${NNORM_AVX2_FLAGS})

file(GLOB target_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/tests/*_target.cpp")
add_library(nnorm_test_targets INTERFACE)
foreach(name avx512 avx2 neon baseline device)
  if(TARGET nnorm_kernels_${name})
    get_target_property(flags nnorm_kernels_${name} COMPILE_OPTIONS)
    add_library(nnorm_test_${name} OBJECT ${target_sources})
    target_compile_definitions(nnorm_test_${name} PRIVATE NNORM_TARGET=${name}_test)
    target_compile_options(nnorm_test_${name} PRIVATE ${flags})
    target_include_directories(nnorm_test_${name} PRIVATE include cpu)
    target_link_libraries(nnorm_test_${name} PRIVATE nnorm_options)
    target_sources(nnorm_test_targets INTERFACE $<TARGET_OBJECTS:nnorm_test_${name}>)
  endif()
endforeach()

file(GLOB test_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/tests/*.cpp")
list(FILTER test_sources EXCLUDE REGEX "_target\\.cpp$")
foreach(source IN LISTS test_sources)
  cmake_path(GET source STEM name)
  add_executable(${name} "${source}")
  target_link_libraries(${name} PRIVATE
    nnorm_options nnorm_cuda_on_host nnorm_kernels nnorm_test_targets onnxruntime_headers ${CMAKE_DL_LIBS})
  target_compile_definitions(${name} PRIVATE "NNORM_ORT_LIBRARY=\"$<TARGET_FILE:nnorm_ort>\""
    $<$<BOOL:${NNORM_SANITIZE}>:NNORM_SANITIZED>)
  add_dependencies(${name} nnorm_ort)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
endforeach()

# nnorm_ort with the kernels of GPUs run by the processor, for the Python tests (make test-cuda-on-host).
if(NOT NNORM_SANITIZE)
  set(folder "${CMAKE_CURRENT_SOURCE_DIR}/onnxruntime")
  file(GLOB sources CONFIGURE_DEPENDS operators/*.cpp "${folder}/*.cpp" "${folder}/cpu/*.cpp")
  list(REMOVE_ITEM sources "${folder}/cpu/solve.cpp")
  add_library(nnorm_ort_cuda_on_host SHARED ${sources} "${folder}/cuda/solve.cpp" tests/cuda_on_host/kernels.cpp)
  target_compile_definitions(nnorm_ort_cuda_on_host PRIVATE "NNORM_EXECUTION_PROVIDER=\"CPUExecutionProvider\"")
  target_link_libraries(nnorm_ort_cuda_on_host PRIVATE
    nnorm_options nnorm_cuda_on_host nnorm_kernels onnxruntime_headers ${CMAKE_DL_LIBS})
endif()

# A test that this build cannot have, so that the summary of a run says so.
function(nnorm_add_skipped_test name reason)
  add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} -E echo "skipped: ${reason}")
  set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "^skipped: ")
endfunction()

# The TensorRT plugins and a program that drives them in TensorRT's place. Theirs are the headers alone, so all of it,
# kernels included, runs on the processor.
if(TARGET tensorrt_headers)
  set(folder "${CMAKE_CURRENT_SOURCE_DIR}/tensorrt")
  add_library(nnorm_trt_on_host MODULE operators/operators.cpp "${folder}/library.cpp" "${folder}/operation.cpp"
    "${folder}/plugin.cpp" tests/cuda_on_host/kernels.cpp)
  add_executable(test_tensorrt_plugin tests/tensorrt/test_tensorrt_plugin.cpp)
  target_compile_definitions(test_tensorrt_plugin PRIVATE "NNORM_PLUGINS=\"$<TARGET_FILE:nnorm_trt_on_host>\"")
  foreach(target nnorm_trt_on_host test_tensorrt_plugin)
    target_include_directories(${target} PRIVATE include tests)
    target_link_libraries(${target} PRIVATE nnorm_options nnorm_cuda_on_host tensorrt_headers ${CMAKE_DL_LIBS})
  endforeach()
  add_dependencies(test_tensorrt_plugin nnorm_trt_on_host)
  add_test(NAME test_tensorrt_plugin COMMAND test_tensorrt_plugin)
  if(TARGET nnorm_trt)
    add_library(mock_nvinfer SHARED tests/tensorrt/mock_nvinfer.cpp)
    target_include_directories(mock_nvinfer PRIVATE tests/cuda_on_host)
    target_compile_options(mock_nvinfer PRIVATE -Wno-deprecated-declarations) # what the registry of version 10 has too
    target_link_libraries(mock_nvinfer PRIVATE nnorm_options tensorrt_headers)
    set_target_properties(mock_nvinfer PROPERTIES PREFIX "" OUTPUT_NAME libnvinfer SUFFIX ".so.${NNORM_TENSORRT_MAJOR}")
    target_compile_definitions(test_tensorrt_plugin PRIVATE
      "NNORM_PLUGINS_FOR_GPU=\"$<TARGET_FILE:nnorm_trt>\"" "NNORM_MOCK_NVINFER=\"$<TARGET_FILE:mock_nvinfer>\""
      "NNORM_PLUGINS_REGISTER=\"$<TARGET_FILE:nnorm_trt_register>\"")
    add_dependencies(test_tensorrt_plugin nnorm_trt nnorm_trt_register mock_nvinfer)
  endif()
else()
  nnorm_add_skipped_test(test_tensorrt_plugin "TensorRT's headers are not here; TENSORRT_INCLUDE_DIR names their folder")
endif()

# tests/gpu/*.cu are compiled by nvcc and need a GPU to run; without one they are skipped.
if(TARGET nnorm_cuda_kernels)
  file(GLOB test_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/*.cu")
  if(NOT TARGET nnorm_trt)
    list(FILTER test_sources EXCLUDE REGEX "tensorrt")
  endif()
  foreach(source IN LISTS test_sources)
    cmake_path(GET source STEM name)
    add_executable(${name} "${source}")
    target_compile_features(${name} PRIVATE cuda_std_17)
    target_compile_definitions(${name} PRIVATE NNORM_TARGET=cuda)
    target_include_directories(${name} PRIVATE tests)
    target_link_libraries(${name} PRIVATE nnorm_cuda_kernels ${CMAKE_DL_LIBS})
    if(TARGET nnorm_trt)
      target_compile_definitions(${name} PRIVATE "NNORM_PLUGINS=\"$<TARGET_FILE:nnorm_trt>\"")
      target_link_libraries(${name} PRIVATE tensorrt_headers)
      add_dependencies(${name} nnorm_trt)
    endif()
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${NNORM_CUDA_ARCHITECTURES}")
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
  endforeach()

  # No test: make bench-gpu runs it.
  add_executable(bench_kernels_gpu "${CMAKE_CURRENT_SOURCE_DIR}/../benchmarks/gpu/kernels.cu")
  target_compile_features(bench_kernels_gpu PRIVATE cuda_std_17)
  target_compile_definitions(bench_kernels_gpu PRIVATE NNORM_TARGET=cuda)
  target_link_libraries(bench_kernels_gpu PRIVATE nnorm_cuda_kernels)
  set_target_properties(bench_kernels_gpu PROPERTIES CUDA_ARCHITECTURES "${NNORM_CUDA_ARCHITECTURES}")
elseif(NOT NNORM_SANITIZE)
  nnorm_add_skipped_test(test_cuda_kernels_gpu "there is no nvcc to compile it with")
endif()
