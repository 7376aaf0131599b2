# Every tests/test_*.cpp is a program that exits with 0 if its tests pass. The programs link the CPU kernels and the
# CUDA kernels compiled for the CPU; NNORM_ORT_LIBRARY is the path of the library to load. tests/mathematics_table.cpp
# is compiled once for each instruction set, with the kernels' flags, and linked into all programs.

# The CUDA kernels compiled for the CPU, cuda/kernels.cu once for each type of tensor, and the functions that their callers need.
add_library(nnorm_cuda_on_host_options INTERFACE)
target_compile_definitions(nnorm_cuda_on_host_options INTERFACE NNORM_CUDA_ON_HOST)
# `#pragma unroll` is for nvcc only. The longjmp() of _FORTIFY_SOURCE refuses to change stacks.
target_compile_options(nnorm_cuda_on_host_options INTERFACE -Wno-unknown-pragmas -U_FORTIFY_SOURCE)
target_include_directories(nnorm_cuda_on_host_options INTERFACE
  "${CMAKE_CURRENT_SOURCE_DIR}/include" "${CMAKE_CURRENT_SOURCE_DIR}/tests/cuda_on_host")
# With sanitizers these objects would take longest to compile. 16-bit tensors get one arithmetic (the other one accesses
# memory as the one of float does), and cuda_on_host.h checks the alignment. The options follow those of nnorm_options.
add_library(nnorm_cuda_on_host_quickly INTERFACE)
if(NNORM_SANITIZE AND NOT NNORM_SANITIZE STREQUAL "ALL")
  target_compile_definitions(nnorm_cuda_on_host_options INTERFACE NNORM_WITHOUT_SAME_BITS)
  target_compile_options(nnorm_cuda_on_host_quickly INTERFACE -fno-sanitize=alignment)
endif()
add_library(nnorm_cuda_on_host INTERFACE)
target_link_libraries(nnorm_cuda_on_host INTERFACE nnorm_cuda_on_host_options)
foreach(type float double nnorm::Float16 nnorm::BFloat16)
  string(REPLACE "::" "_" name "nnorm_cuda_on_host_${type}")
  add_library(${name} OBJECT tests/cuda_on_host/kernels.cpp)
  target_compile_definitions(${name} PRIVATE NNORM_TYPE=${type})
  target_include_directories(${name} PRIVATE cuda)
  target_link_libraries(${name} PRIVATE nnorm_options nnorm_cuda_on_host_options nnorm_cuda_on_host_quickly)
  target_sources(nnorm_cuda_on_host INTERFACE $<TARGET_OBJECTS:${name}>)
endforeach()

add_library(nnorm_mathematics_tables INTERFACE)
foreach(name avx512 avx2 neon baseline)
  if(TARGET nnorm_kernels_${name})
    get_target_property(flags nnorm_kernels_${name} COMPILE_OPTIONS)
    add_library(nnorm_mathematics_${name} OBJECT tests/mathematics_table.cpp)
    target_compile_definitions(nnorm_mathematics_${name} PRIVATE NNORM_INSTRUCTION_SET=${name}_test)
    target_compile_options(nnorm_mathematics_${name} PRIVATE ${flags})
    target_include_directories(nnorm_mathematics_${name} PRIVATE include cpu)
    target_link_libraries(nnorm_mathematics_${name} PRIVATE nnorm_options)
    target_sources(nnorm_mathematics_tables INTERFACE $<TARGET_OBJECTS:nnorm_mathematics_${name}>)
  endif()
endforeach()

# These run the CPU kernels alone. `make same-bits-neon` compiles them for AArch64 and runs them in an emulator.
set(NNORM_TESTS_OF_KERNELS test_same_bits test_quantized_batch_normal_norm test_training)
foreach(name IN LISTS NNORM_TESTS_OF_KERNELS)
  add_executable(${name} tests/${name}.cpp)
  target_link_libraries(${name} PRIVATE nnorm_kernels)
  add_test(NAME ${name} COMMAND ${name})
endforeach()
target_sources(test_training PRIVATE training/library.cpp)
target_include_directories(test_training PRIVATE training)
target_link_libraries(test_training PRIVATE nnorm_training_kernels)

# Loads the libraries of wheels for other processors (tests/project/test_wheels.py).
add_executable(load_library tests/emulated/load_library.cpp)
target_link_libraries(load_library PRIVATE nnorm_options onnxruntime_headers ${CMAKE_DL_LIBS})

# `make bench-check` counts the instructions of this program.
add_executable(count_instructions tests/count_instructions.cpp)
target_link_libraries(count_instructions PRIVATE nnorm_kernels)

# ψ of every float against the C library, whose vector functions need -ffast-math. `make every-float` runs it for long.
add_executable(every_float tests/every_float/every_float.cpp tests/every_float/reference.cpp)
set_source_files_properties(tests/every_float/reference.cpp PROPERTIES COMPILE_OPTIONS "-O3;-ffast-math")
target_link_libraries(every_float PRIVATE nnorm_kernels)
if(NOT NNORM_INSTRUMENTED)
  add_test(NAME every_float COMMAND every_float)
endif()

file(GLOB test_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/tests/test_*.cpp")
list(JOIN NNORM_TESTS_OF_KERNELS "|" tests_of_kernels)
list(FILTER test_sources EXCLUDE REGEX "/(${tests_of_kernels})\\.cpp$")
foreach(source IN LISTS test_sources)
  cmake_path(GET source STEM name)
  add_executable(${name} "${source}")
  target_link_libraries(${name} PRIVATE
    nnorm_options nnorm_cuda_on_host nnorm_kernels nnorm_mathematics_tables onnxruntime_headers ${CMAKE_DL_LIBS})
  target_compile_definitions(${name} PRIVATE "NNORM_ORT_LIBRARY=\"$<TARGET_FILE:nnorm_ort>\"")
  add_dependencies(${name} nnorm_ort)
  set(arguments)
  if(NNORM_INSTRUMENTED AND name STREQUAL "test_cuda_same_bits")
    set(arguments 40000)
  elseif(NNORM_INSTRUMENTED AND name STREQUAL "test_cuda_kernels")
    set(arguments 20000 13)
  elseif(name STREQUAL "test_cuda_kernels")
    set(arguments 1048576 2) # each second size; `make test-cpp-long` runs all
  endif()
  add_test(NAME ${name} COMMAND ${name} ${arguments})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
endforeach()
set_tests_properties(test_cuda_kernels PROPERTIES COST 1000) # more than the seconds of any other: the longest starts first
target_include_directories(test_dispatch PRIVATE cpu) # it includes dispatch.cpp
target_include_directories(test_processor PRIVATE cpu)
target_include_directories(test_channel_kernels PRIVATE cuda)
target_include_directories(test_row_kernels PRIVATE cuda)

# These programs call the callbacks of nnorm_ort as ONNX Runtime does, and make its functions and the library's
# allocations fail. ctest runs random nodes for a short time; `make fuzz-kernels` runs them for long.
foreach(name test_registration test_quantized_operators test_long_rows fuzz_operators fuzz_quantized_operators)
  add_executable(${name} tests/onnxruntime/${name}.cpp tests/failing/allocations.cpp)
  target_link_libraries(${name} PRIVATE nnorm_ort_cpu nnorm_ort_operators)
endforeach()
foreach(name test_registration test_quantized_operators test_long_rows)
  add_test(NAME ${name} COMMAND ${name})
endforeach()
foreach(name fuzz_operators fuzz_quantized_operators)
  add_test(NAME ${name} COMMAND ${name} $<IF:$<BOOL:${NNORM_INSTRUMENTED}>,4000,20000> 1)
endforeach()

# Runs a program twice: 16-bit tensors with the device's approximate instructions, and with the bits of the CPU kernels.
# The sanitizers see one, unless they check everything.
function(nnorm_add_test_of_both_arithmetics name)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "${ARGN}")
  if(NOT NNORM_SANITIZE OR NNORM_SANITIZE STREQUAL "ALL")
    add_test(NAME ${name}_same_bits COMMAND ${name})
    set_tests_properties(${name}_same_bits PROPERTIES ENVIRONMENT "${ARGN};NNORM_EXPORT_SAME_BITS=1")
  endif()
endfunction()

# nnorm_ort and the CUDA library that it loads, whose kernels are compiled for the CPU.
file(GLOB provider_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/onnxruntime/cuda/*.cpp")
add_library(nnorm_cuda_library_on_host MODULE ${provider_sources})
target_link_libraries(nnorm_cuda_library_on_host PRIVATE nnorm_ort_operators nnorm_cuda_on_host)
add_executable(test_cuda_library tests/onnxruntime/test_cuda_library.cpp)
target_include_directories(test_cuda_library PRIVATE onnxruntime)
target_link_libraries(test_cuda_library PRIVATE nnorm_options nnorm_kernels onnxruntime_headers ${CMAKE_DL_LIBS})
target_compile_definitions(test_cuda_library PRIVATE "NNORM_ORT_LIBRARY=\"$<TARGET_FILE:nnorm_ort>\""
  "NNORM_CUDA_ON_HOST_LIBRARY=\"$<TARGET_FILE:nnorm_cuda_library_on_host>\"")
add_dependencies(test_cuda_library nnorm_ort nnorm_cuda_library_on_host)
# The program loads copies of one library.
nnorm_add_test_of_both_arithmetics(test_cuda_library "ASAN_OPTIONS=detect_odr_violation=0")

# nnorm_ort with the CUDA kernels compiled for the CPU, for the Python tests (make test-cuda-on-host).
if(NOT NNORM_SANITIZE)
  add_library(nnorm_ort_cuda_on_host SHARED
    $<FILTER:$<TARGET_OBJECTS:nnorm_ort_cpu>,EXCLUDE,/solve\\.cpp> onnxruntime/cuda/solve.cpp)
  target_compile_definitions(nnorm_ort_cuda_on_host PRIVATE NNORM_CUDA_OPERATORS_OF_CPU)
  target_link_libraries(nnorm_ort_cuda_on_host PRIVATE
    nnorm_ort_operators nnorm_cuda_on_host nnorm_kernels ${CMAKE_DL_LIBS})
endif()

# Adds a test that this build cannot run: the summary of ctest lists it as skipped.
function(nnorm_add_skipped_test name reason)
  add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} -E echo "skipped: ${reason}")
  set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "^skipped: ")
endfunction()

# The TensorRT plugins, and a program that calls them as TensorRT does. They need only TensorRT's headers: everything
# runs on the CPU, the kernels too.
if(TARGET tensorrt_headers)
  set(folder "${CMAKE_CURRENT_SOURCE_DIR}/tensorrt")
  set(plugin_sources "${folder}/library.cpp" "${folder}/operation.cpp" "${folder}/plugin.cpp")
  add_library(nnorm_trt_on_host MODULE ${plugin_sources})
  add_executable(test_tensorrt_plugin tests/tensorrt/test_tensorrt_plugin.cpp)
  add_executable(test_plugin_failures tests/tensorrt/test_plugin_failures.cpp tests/failing/allocations.cpp ${plugin_sources})
  target_compile_definitions(test_tensorrt_plugin PRIVATE "NNORM_PLUGINS=\"$<TARGET_FILE:nnorm_trt_on_host>\"")
  foreach(target nnorm_trt_on_host test_tensorrt_plugin test_plugin_failures)
    target_include_directories(${target} PRIVATE tests)
    target_link_libraries(${target} PRIVATE nnorm_options nnorm_cuda_on_host tensorrt_headers ${CMAKE_DL_LIBS})
  endforeach()
  # Mock libraries with the names by which both programs load TensorRT's.
  math(EXPR other_major "21 - ${NNORM_TENSORRT_MAJOR}")
  foreach(name libnvinfer.so.${NNORM_TENSORRT_MAJOR} libnvinfer.so.${other_major}
               libnvinfer_lean.so.${NNORM_TENSORRT_MAJOR} libtensorrt_rtx.so.1)
    add_library(mock_${name} SHARED tests/tensorrt/mock_nvinfer.cpp)
    target_include_directories(mock_${name} PRIVATE tests/cuda_on_host)
    target_link_libraries(mock_${name} PRIVATE nnorm_options tensorrt_headers)
    set_target_properties(mock_${name} PROPERTIES PREFIX "" OUTPUT_NAME ${name} SUFFIX ""
      LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/mock")
    list(APPEND mocks mock_${name})
  endforeach()
  add_dependencies(test_tensorrt_plugin nnorm_trt_on_host ${mocks})
  target_compile_definitions(test_tensorrt_plugin PRIVATE "NNORM_MOCKS=\"${CMAKE_CURRENT_BINARY_DIR}/mock/\"")
  nnorm_add_test_of_both_arithmetics(test_tensorrt_plugin)
  add_test(NAME test_plugin_failures COMMAND test_plugin_failures)
  if(TARGET nnorm_trt)
    target_compile_definitions(test_tensorrt_plugin PRIVATE "NNORM_PLUGINS_FOR_GPU=\"$<TARGET_FILE:nnorm_trt>\"")
    add_executable(test_tensorrt_registration tests/tensorrt/test_tensorrt_registration.cpp)
    target_compile_definitions(test_tensorrt_registration PRIVATE "NNORM_MOCKS=\"${CMAKE_CURRENT_BINARY_DIR}/mock/\""
      "NNORM_PLUGINS=\"$<TARGET_FILE:nnorm_trt>\"" "NNORM_REGISTER=\"$<TARGET_FILE:nnorm_trt_register>\""
      "NNORM_REGISTER_RTX=\"$<TARGET_FILE:nnorm_trt_register_rtx>\"")
    target_include_directories(test_tensorrt_registration PRIVATE tests tests/cuda_on_host)
    target_link_libraries(test_tensorrt_registration PRIVATE nnorm_options nnorm_kernels tensorrt_headers ${CMAKE_DL_LIBS})
    add_dependencies(test_tensorrt_plugin nnorm_trt)
    add_dependencies(test_tensorrt_registration nnorm_trt_register nnorm_trt_register_rtx ${mocks})
    add_test(NAME test_tensorrt_registration COMMAND test_tensorrt_registration)
  endif()
else()
  nnorm_add_skipped_test(test_tensorrt_plugin "TensorRT's headers were not found; set TENSORRT_INCLUDE_DIR to their folder")
endif()

# tests/gpu/*.cu are compiled by nvcc. Without a GPU the programs exit as skipped.
if(TARGET nnorm_cuda_kernels)
  file(GLOB test_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/*.cu")
  if(NOT TARGET nnorm_trt)
    list(FILTER test_sources EXCLUDE REGEX "tensorrt")
  endif()
  foreach(source IN LISTS test_sources)
    cmake_path(GET source STEM name)
    add_executable(${name} "${source}")
    target_compile_features(${name} PRIVATE cuda_std_17)
    target_compile_definitions(${name} PRIVATE NNORM_INSTRUCTION_SET=cuda)
    target_include_directories(${name} PRIVATE tests)
    target_link_libraries(${name} PRIVATE nnorm_cuda_kernels nnorm_kernels ${CMAKE_DL_LIBS})
    if(TARGET nnorm_trt)
      target_compile_definitions(${name} PRIVATE "NNORM_PLUGINS=\"$<TARGET_FILE:nnorm_trt>\""
        "NNORM_MOCKS=\"${CMAKE_CURRENT_BINARY_DIR}/mock/\"")
      target_link_libraries(${name} PRIVATE tensorrt_headers)
      add_dependencies(${name} nnorm_trt ${mocks})
    endif()
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${NNORM_CUDA_ARCHITECTURES}")
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
  endforeach()

  # The oldest GPU: its assembler warns of a kernel that asks for more threads than a multiprocessor has. The kernels of
  # float ask for the most. Those of bfloat16 have code of their own before compute capability 8.0, and take a minute:
  # `make test-cpp-long` compiles them.
  if(NNORM_WERROR)
    nnorm_add_cuda_kernels(nnorm_cuda_oldest_float float 75-real)
    nnorm_add_cuda_kernels(nnorm_cuda_oldest_bfloat16 nnorm::BFloat16 75-real)
    set_target_properties(nnorm_cuda_oldest_bfloat16 PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()

  # make bench-gpu runs it; it is not a test.
  add_executable(bench_kernels_gpu "${CMAKE_CURRENT_SOURCE_DIR}/../benchmarks/gpu/kernels.cu")
  target_compile_features(bench_kernels_gpu PRIVATE cuda_std_17)
  target_compile_definitions(bench_kernels_gpu PRIVATE NNORM_INSTRUCTION_SET=cuda)
  target_link_libraries(bench_kernels_gpu PRIVATE nnorm_cuda_kernels)
  set_target_properties(bench_kernels_gpu PROPERTIES CUDA_ARCHITECTURES "${NNORM_CUDA_ARCHITECTURES}")
elseif(NOT NNORM_SANITIZE)
  nnorm_add_skipped_test(test_cuda_kernels_gpu "the kernels for GPUs are not built; NNORM_CUDA=ON builds them")
endif()
