# nnorm_ort: the shared library that ONNX Runtime loads (SessionOptions.register_custom_ops_library), and, with CUDA,
# nnorm_ort_cuda, which that one loads from its own folder.
#
# They need nothing of ONNX Runtime to link or to load, only its C header: the runtime hands its functions over. The
# operators are the same in both (onnxruntime/*.cpp); what runs them is not (onnxruntime/cpu, onnxruntime/cuda).

file(GLOB operator_sources CONFIGURE_DEPENDS
  "${CMAKE_CURRENT_SOURCE_DIR}/operators/*.cpp" "${CMAKE_CURRENT_SOURCE_DIR}/onnxruntime/*.cpp")

include(CheckLinkerFlag)
if(NOT APPLE)
  check_linker_flag(CXX "-static-libstdc++;-static-libgcc" NNORM_CAN_LINK_CXX_STATICALLY)
endif()

# A library that other people's processes load. Hidden visibility does not reach a static libstdc++; a list of what is
# exported (exports.map; exports.list for macOS) does.
function(nnorm_add_plugin name folder)
  add_library(${name} SHARED ${ARGN})
  target_link_libraries(${name} PRIVATE nnorm_options)
  # Where nnorm_export/library.py looks for it, relative to what holds the package.
  install(TARGETS ${name} LIBRARY DESTINATION nnorm_export/lib COMPONENT python)
  if(APPLE)
    target_link_options(${name} PRIVATE "LINKER:-exported_symbols_list,${folder}/exports.list")
    set_target_properties(${name} PROPERTIES LINK_DEPENDS "${folder}/exports.list")
    return()
  endif()
  target_link_options(${name} PRIVATE "LINKER:--version-script=${folder}/exports.map" "LINKER:-z,relro,-z,now")
  set_target_properties(${name} PROPERTIES LINK_DEPENDS "${folder}/exports.map")
  if(NOT NNORM_SANITIZE) # a sanitizer's own functions stay undefined, and it wants the shared C++ library
    # Without its unused sections, the static C++ library below wants a newer libc than anything here does.
    target_link_options(${name} PRIVATE "LINKER:--no-undefined" "LINKER:--gc-sections")
    # With the C++ library inside, the file runs beside whichever one the process has loaded, or none.
    if(NNORM_CAN_LINK_CXX_STATICALLY)
      target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc)
    endif()
  endif()
endfunction()

set(folder "${CMAKE_CURRENT_SOURCE_DIR}/onnxruntime/cpu")
file(GLOB provider_sources CONFIGURE_DEPENDS "${folder}/*.cpp")
nnorm_add_plugin(nnorm_ort "${folder}" ${operator_sources} ${provider_sources})
target_link_libraries(nnorm_ort PRIVATE nnorm_kernels onnxruntime_headers ${CMAKE_DL_LIBS})

if(TARGET nnorm_cuda_kernels)
  set(folder "${CMAKE_CURRENT_SOURCE_DIR}/onnxruntime/cuda")
  file(GLOB provider_sources CONFIGURE_DEPENDS "${folder}/*.cpp")
  nnorm_add_plugin(nnorm_ort_cuda "${folder}" ${operator_sources} ${provider_sources})
  target_link_libraries(nnorm_ort_cuda PRIVATE nnorm_cuda_kernels onnxruntime_headers)
endif()
