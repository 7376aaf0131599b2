// Loads a library of kernels, registers its operators with an ONNX Runtime that is too old, and prints the error.
//
//   load_library PATH    for tests/project/test_wheels.py, which runs it for the processor of a wheel
//
// To return the error, the library must have run its relocations, constructors and static C++ library. ONNX Runtime is
// not needed.
#include <dlfcn.h>
#include <onnxruntime_c_api.h>

#include <cstdio>

namespace {

OrtStatus* ORT_API_CALL refuse(OrtErrorCode, const char* message) noexcept {
  std::puts(message);
  return nullptr;
}

const OrtApi* ORT_API_CALL get_api(uint32_t) noexcept {
  static OrtApi api{};
  api.CreateStatus = refuse;
  return &api;
}

const char* ORT_API_CALL get_version() noexcept { return "1.17.3"; }

}  // namespace

int main(int count, char** arguments) {
  void* const library = count == 2 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  void* const function = library == nullptr ? nullptr : dlsym(library, "RegisterCustomOps");
  if (function == nullptr) {
    std::fprintf(stderr, "%s\n", count == 2 ? dlerror() : "load_library PATH");
    return 1;
  }
  const OrtApiBase base{get_api, get_version};
  reinterpret_cast<OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*)>(function)(nullptr, &base);
}
