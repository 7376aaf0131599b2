// A library that registers the plugins with the TensorRT of the process when it is loaded, for hosts that only load
// libraries: Polygraphy's --plugins, trtexec --staticPlugins, ONNX Runtime's trt_extra_plugin_lib_paths, Triton.
//
// There is one library for each version of the registry, whose table of functions differs between TensorRT 10 and 11.
// The headers decide the version. TensorRT-RTX has the registry of TensorRT 10 up to 1.4, and that of 11 from 1.5 on.
//
// For TensorRT-RTX this file is compiled with the SONAME libtensorrt_rtx.so. Before TensorRT-RTX's parser creates a
// plugin, it opens the library of that name, which NVIDIA's wheels lack, and without it the process ends. The parser
// finds this library instead, and through it the functions of libtensorrt_rtx.so.1, which it links.
#include <NvInferRuntime.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "runtimes.h"

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);  // of libnnorm_trt.so

namespace {

using namespace nvinfer1;

constexpr int registry_version = NV_TENSORRT_MAJOR;

// The version of a library's registry: 10 or 11.
int registry_version_of(const char* library, void* handle) {
  if (std::strcmp(library, nnorm::trt::rtx_library) != 0) return std::strstr(library, ".so.10") != nullptr ? 10 : 11;
  const auto minor = reinterpret_cast<int32_t (*)()>(dlsym(handle, "getInferLibMinorVersion"));
  return minor != nullptr && minor() >= 5 ? 11 : 10;
}

// Whether the registry has the plugin already: the library may also be registered by its path, or exist twice.
bool is_registered(const IPluginRegistry& registry, const IPluginCreatorV3One& creator) {
  int32_t count = 0;
  IPluginCreatorInterface* const* const all = registry.getAllCreators(&count);
  for (int32_t i = 0; all != nullptr && i < count; ++i) {
    if (all[i] == &creator) return true;
    if (std::strcmp(all[i]->getInterfaceInfo().kind, creator.getInterfaceInfo().kind) != 0) continue;
    const auto& other = static_cast<const IPluginCreatorV3One&>(*all[i]);
    if (std::strcmp(other.getPluginName(), creator.getPluginName()) == 0 &&
        std::strcmp(other.getPluginVersion(), creator.getPluginVersion()) == 0 &&
        std::strcmp(other.getPluginNamespace(), creator.getPluginNamespace()) == 0)
      return true;
  }
  return false;
}

void register_with(IPluginRegistry& registry) {
  int32_t count = 0;
  IPluginCreatorInterface* const* const creators = getCreators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto& creator = static_cast<IPluginCreatorV3One&>(*creators[i]);
    if (!is_registered(registry, creator) && !registry.registerCreator(creator, creator.getPluginNamespace()))
      std::fprintf(stderr, "[nnorm] TensorRT refused the plugin %s\n", creator.getPluginName());
  }
}

// Registers the plugins with every TensorRT of the process whose registry has this version.
struct Registration {
  Registration() {
    bool registered = false;
    std::string others;
    for (const char* library : {"libnvinfer.so.10", "libnvinfer.so.11", "libnvinfer_lean.so.10", "libnvinfer_lean.so.11",
                                "libnvinfer_dispatch.so.10", "libnvinfer_dispatch.so.11", nnorm::trt::rtx_library}) {
      void* const handle = nnorm::trt::loaded(library);  // never closed: its registry keeps the plugins
      if (handle == nullptr) continue;
      const auto get = reinterpret_cast<IPluginRegistry* (*)()>(dlsym(handle, "getPluginRegistry"));
      IPluginRegistry* const registry = get == nullptr ? nullptr : get();
      if (registry == nullptr || registry_version_of(library, handle) != registry_version) {
        others += std::string(others.empty() ? "" : ", ") + library;
        continue;
      }
      register_with(*registry);
      registered = true;
    }
    if (registered) return;
    const char* const rtx = registry_version == 10 ? "TensorRT-RTX up to 1.4" : "TensorRT-RTX from 1.5 on";
    std::fprintf(stderr, "[nnorm] the plugins are not registered: this library is for TensorRT %d and %s, and this process has %s. %s\n",
                 registry_version, rtx, others.empty() ? "not loaded any TensorRT" : others.c_str(),
                 others.empty() ? "Load TensorRT first" : "Load the library of its version: libnnorm_trt_register_10.so or _11.so");
  }
} const registration;

}  // namespace
