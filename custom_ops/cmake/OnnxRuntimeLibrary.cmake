# nnorm_ort: the shared library that ONNX Runtime loads (SessionOptions.register_custom_ops_library), and, with CUDA,
# nnorm_ort_cuda, which nnorm_ort loads from its own folder.
#
# They do not link ONNX Runtime: it passes its functions to them, so only its C header is needed. Both have the same
# operators (onnxruntime/*.cpp, the target nnorm_ort_operators) and different code to run them (onnxruntime/cpu,
# onnxruntime/cuda).

file(GLOB operator_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/onnxruntime/*.cpp")
add_library(nnorm_ort_operators OBJECT ${operator_sources})
target_include_directories(nnorm_ort_operators PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}/include")
target_link_libraries(nnorm_ort_operators PUBLIC nnorm_options onnxruntime_headers)

include(CheckLinkerFlag)
if(NOT APPLE)
  check_linker_flag(CXX "-static-libstdc++;-static-libgcc" NNORM_CAN_LINK_CXX_STATICALLY)
endif()

# A library that other programs load. It exports only the symbols of a list (exports.map; for macOS exports.list):
# hidden visibility would not hide the symbols of the static C++ library.
function(nnorm_add_plugin name folder)
  add_library(${name} SHARED ${ARGN})
  target_link_libraries(${name} PRIVATE nnorm_options)
  set_property(GLOBAL APPEND PROPERTY NNORM_LIBRARIES ${name}) # for Sbom.cmake
  # nnorm_export/library.py looks for the library there, relative to the folder that holds the package.
  # COMPONENT belongs to the kind of file before it. A DLL is a RUNTIME.
  install(TARGETS ${name}
    LIBRARY DESTINATION nnorm_export/lib COMPONENT python
    RUNTIME DESTINATION nnorm_export/lib COMPONENT python)
  if(WIN32)
    # A DLL exports what exported.h marks. It contains the C++ library, which a machine may lack.
    set_target_properties(${name} PROPERTIES PREFIX "")
    if(NNORM_CAN_LINK_CXX_STATICALLY)
      target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc)
    endif()
    return()
  endif()
  if(APPLE)
    target_link_options(${name} PRIVATE "LINKER:-exported_symbols_list,${folder}/exports.list")
    set_target_properties(${name} PROPERTIES LINK_DEPENDS "${folder}/exports.list")
    return()
  endif()
  target_link_options(${name} PRIVATE "LINKER:--version-script=${folder}/exports.map" "LINKER:-z,relro,-z,now")
  # ONNX Runtime closes the library with each session's options. An unloaded library would leak what it keeps for the
  # process (its operators, the C++ library's memory for exceptions), 45 kB for each session.
  target_link_options(${name} PRIVATE "LINKER:-z,nodelete")
  set_target_properties(${name} PROPERTIES LINK_DEPENDS "${folder}/exports.map")
  if(NOT NNORM_SANITIZE) # a sanitizer's own functions stay undefined, and it needs the shared C++ library
    # --gc-sections: unused sections of the static C++ library need a newer libc than the used ones.
    target_link_options(${name} PRIVATE "LINKER:--no-undefined" "LINKER:--gc-sections")
    # With a static C++ library, the file works with any version of the shared one in the process, or none.
    if(NNORM_CAN_LINK_CXX_STATICALLY)
      target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc)
    endif()
  endif()
endfunction()

# Objects, because the tests link them too.
set(folder "${CMAKE_CURRENT_SOURCE_DIR}/onnxruntime/cpu")
file(GLOB provider_sources CONFIGURE_DEPENDS "${folder}/*.cpp")
add_library(nnorm_ort_cpu OBJECT ${provider_sources})
target_link_libraries(nnorm_ort_cpu PUBLIC nnorm_options nnorm_ort_operators nnorm_kernels ${CMAKE_DL_LIBS})
nnorm_add_plugin(nnorm_ort "${folder}" $<TARGET_OBJECTS:nnorm_ort_cpu>)
target_link_libraries(nnorm_ort PRIVATE nnorm_ort_operators nnorm_kernels ${CMAKE_DL_LIBS})

if(TARGET nnorm_cuda_kernels)
  set(folder "${CMAKE_CURRENT_SOURCE_DIR}/onnxruntime/cuda")
  file(GLOB provider_sources CONFIGURE_DEPENDS "${folder}/*.cpp")
  nnorm_add_plugin(nnorm_ort_cuda "${folder}" ${provider_sources})
  target_link_libraries(nnorm_ort_cuda PRIVATE nnorm_ort_operators nnorm_cuda_kernels)
endif()
