// The names of TensorRT's libraries that a process may have loaded.
#pragma once

#include <dlfcn.h>

namespace nnorm::trt {

constexpr const char* rtx_library = "libtensorrt_rtx.so.1";

// A handle of the library if this process has loaded it, else null. Each call adds a reference, which dlclose()
// removes.
inline void* loaded(const char* library) { return dlopen(library, RTLD_LAZY | RTLD_NOLOAD); }

}  // namespace nnorm::trt
