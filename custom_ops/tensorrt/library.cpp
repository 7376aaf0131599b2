// Defines the functions that hosts call: trtexec --dynamicPlugins, IPluginRegistry::loadLibrary, and register.cpp.
#include <cstdio>
#include <memory>

#include "plugin.h"

#define NNORM_EXPORT extern "C" __attribute__((visibility("default")))

namespace nnorm::trt {
namespace {

struct Creators {
  std::vector<std::unique_ptr<Creator>> owned;
  std::vector<nvinfer1::IPluginCreatorInterface*> pointers;

  // Each operator is in the namespace of the nodes and in the empty one, for parsers that do not read the namespace.
  Creators() {
    for (const std::unique_ptr<Operation>& operation : operations())
      for (const char* plugin_namespace : {"nnorm", ""}) {
        owned.push_back(std::make_unique<Creator>(*operation, plugin_namespace));
        pointers.push_back(owned.back().get());
      }
  }
};

}  // namespace
}  // namespace nnorm::trt

// No exception may leave the library: the host may have another C++ library.
NNORM_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) noexcept try {
  static const auto& creators = *new nnorm::trt::Creators();  // never destroyed: registries keep them
  count = int32_t(creators.pointers.size());
  return creators.pointers.data();
} catch (...) {  // the standard library throws only std::bad_alloc here
  std::fprintf(stderr, "[nnorm] the plugins are not available: out of memory\n");
  count = 0;
  return nullptr;
}

// Hosts call this function in every plugin library. The finder's functions differ between TensorRT 10 and 11, so the
// finder is not used.
NNORM_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder*) {}
