# nnorm_training: the kernels of PyTorch's training layers on CPUs. Python loads the library through ctypes, so it depends
# on no version of PyTorch or Python.

add_library(nnorm_training_kernels STATIC)
target_link_libraries(nnorm_training_kernels PUBLIC nnorm_kernels)
set_target_properties(nnorm_training_kernels PROPERTIES LINKER_LANGUAGE CXX)
foreach(name IN LISTS NNORM_INSTRUCTION_SETS)
  nnorm_compile_for(${name} nnorm_training_${name} "${CMAKE_CURRENT_SOURCE_DIR}/training/instruction_set.cpp")
  target_sources(nnorm_training_kernels PRIVATE $<TARGET_OBJECTS:nnorm_training_${name}>)
endforeach()

set(folder "${CMAKE_CURRENT_SOURCE_DIR}/training")
nnorm_add_plugin(nnorm_training "${folder}" "${folder}/library.cpp")
target_link_libraries(nnorm_training PRIVATE nnorm_training_kernels)
