// The companion for hosts that only load a library: Polygraphy's --plugins, trtexec --staticPlugins, ONNX Runtime's
// trt_extra_plugin_lib_paths, Triton. Loading it registers the plugins with the TensorRT of the process.
//
// One for each major version of TensorRT: the registry's functions lie elsewhere in 11 than in 10.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);  // of libnnorm_trt.so

#define NNORM_TEXT_OF(value) #value
#define NNORM_TEXT(value) NNORM_TEXT_OF(value)

namespace {

struct Registration {
  Registration() {
    const char* const library = "libnvinfer.so." NNORM_TEXT(NV_TENSORRT_MAJOR);
    // The one that the process has, and no second one.
    void* const tensorrt = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    void* const function = tensorrt == nullptr ? nullptr : dlsym(tensorrt, "getPluginRegistry");
    if (function == nullptr) {
      std::fprintf(stderr, "[nnorm] %s is not loaded in this process: the plugins are not registered\n", library);
      return;
    }
    nvinfer1::IPluginRegistry* const registry = reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(function)();
    int32_t count = 0;
    nvinfer1::IPluginCreatorInterface* const* const creators = getCreators(count);
    for (int32_t i = 0; i < count; ++i) {
      auto* const creator = static_cast<nvinfer1::IPluginCreatorV3One*>(creators[i]);
      if (!registry->registerCreator(*creator, creator->getPluginNamespace()))
        std::fprintf(stderr, "[nnorm] TensorRT refused the plugin %s\n", creator->getPluginName());
    }
  }
} const registration;

}  // namespace
