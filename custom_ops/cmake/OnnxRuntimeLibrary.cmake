# nnorm_ort: the shared library that ONNX Runtime loads (SessionOptions.register_custom_ops_library).
#
# It needs nothing of ONNX Runtime to link or to load, only its C header: the runtime hands its functions over.

file(GLOB binding_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/onnxruntime/*.cpp")
add_library(nnorm_ort SHARED ${binding_sources})
target_link_libraries(nnorm_ort PRIVATE nnorm_options nnorm_kernels onnxruntime_headers)

# Hidden visibility does not reach a static libstdc++; a list of what is exported does.
set(exports "${CMAKE_CURRENT_SOURCE_DIR}/onnxruntime/exports")
if(APPLE)
  target_link_options(nnorm_ort PRIVATE "LINKER:-exported_symbols_list,${exports}.list")
  set_target_properties(nnorm_ort PROPERTIES LINK_DEPENDS "${exports}.list")
else()
  target_link_options(nnorm_ort PRIVATE "LINKER:--version-script=${exports}.map" "LINKER:-z,relro,-z,now")
  set_target_properties(nnorm_ort PROPERTIES LINK_DEPENDS "${exports}.map")
  if(NOT NNORM_SANITIZE) # a sanitizer's own functions stay undefined, and it wants the shared C++ library
    # Without its unused sections, the static C++ library below wants a newer libc than anything here does.
    target_link_options(nnorm_ort PRIVATE "LINKER:--no-undefined" "LINKER:--gc-sections")
    # With the C++ library inside, the file runs beside whichever one the process has loaded, or none.
    include(CheckLinkerFlag)
    check_linker_flag(CXX "-static-libstdc++;-static-libgcc" NNORM_CAN_LINK_CXX_STATICALLY)
    if(NNORM_CAN_LINK_CXX_STATICALLY)
      target_link_options(nnorm_ort PRIVATE -static-libstdc++ -static-libgcc)
    endif()
  endif()
endif()

# Where nnorm_export/library.py looks for it, relative to what holds the package.
install(TARGETS nnorm_ort LIBRARY DESTINATION nnorm_export/lib COMPONENT python)
