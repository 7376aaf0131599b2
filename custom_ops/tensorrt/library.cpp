// The functions that hosts look for: trtexec --dynamicPlugins, IPluginRegistry::loadLibrary, and register.cpp.
#include <memory>

#include "plugin.h"

#define NNORM_EXPORT extern "C" __attribute__((visibility("default")))

// Each operator in the namespace that the nodes name, and in the empty one, for parsers that do not read the namespace.
NNORM_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  using namespace nnorm::trt;
  static const auto& creators = *[] {
    auto* all = new std::vector<nvinfer1::IPluginCreatorInterface*>();  // never destroyed: registries keep them
    for (const std::unique_ptr<Operation>& operation : operations())
      for (const char* plugin_namespace : {"nnorm", ""}) all->push_back(new Creator(*operation, plugin_namespace));
    return all;
  }();
  count = int32_t(creators.size());
  return creators.data();
}

// Hosts call it in every plugin library. The finder's functions differ between TensorRT 10 and 11, so it is not used.
NNORM_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder*) {}
