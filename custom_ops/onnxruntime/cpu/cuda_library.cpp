#include "cuda_library.h"

#if defined(_WIN32)

// The kernels for GPUs are not built for Windows.
void nnorm::ort::add_cuda_operators(const OrtApi*, uint32_t, OrtCustomOpDomain*) {}

#else

#include <dlfcn.h>
#include <sys/stat.h>

#include "../cuda_interface.h"

namespace nnorm::ort {
namespace {

// The path of the CUDA library in this library's folder; empty if the file does not exist.
std::string path_beside_this() {
  Dl_info self;
  if (dladdr(reinterpret_cast<const void*>(&path_beside_this), &self) == 0) return "";
  const std::string here = self.dli_fname;
  const std::string path = here.substr(0, here.rfind('/') + 1) + NNORM_CUDA_LIBRARY;
  struct stat status;
  return stat(path.c_str(), &status) == 0 ? path : "";
}

}  // namespace

void add_cuda_operators(const OrtApi* api, uint32_t version, OrtCustomOpDomain* domain) {
  const std::string path = path_beside_this();
  if (path.empty()) return;
  // Never closed: sessions may use its operators until the process ends.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* function = library ? dlsym(library, NNORM_ADD_CUDA_OPERATORS) : nullptr;
  if (function == nullptr) {
    const char* reason = dlerror();
    throw Error{ORT_FAIL, "cannot use " + path + " (" + (reason ? reason : "unknown error") +
                              "); reinstall nnorm_export, or delete the file to run without kernels for GPUs"};
  }
  check(api, reinterpret_cast<AddCudaOperators*>(function)(api, version, domain));
}

}  // namespace nnorm::ort

#endif
