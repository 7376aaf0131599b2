// The libraries of TensorRT that a process may have loaded, by their names.
#pragma once

#include <dlfcn.h>

namespace nnorm::trt {

constexpr const char* rtx_library = "libtensorrt_rtx.so.1";

// The library, if this process has loaded it, else null. Each call adds a reference, which dlclose() takes away.
inline void* loaded(const char* library) { return dlopen(library, RTLD_LAZY | RTLD_NOLOAD); }

}  // namespace nnorm::trt
