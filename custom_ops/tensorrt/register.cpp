// A library that registers the plugins with the TensorRT of the process when it is loaded, for hosts that only load
// libraries: Polygraphy's --plugins, trtexec --staticPlugins, ONNX Runtime's trt_extra_plugin_lib_paths, Triton.
//
// There is one for each major version of TensorRT: the registry's functions differ between TensorRT 10 and 11.
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
    // RTLD_NOLOAD: the TensorRT that the process has already loaded.
    void* const tensorrt = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    void* const function = tensorrt == nullptr ? nullptr : dlsym(tensorrt, "getPluginRegistry");
    if (function == nullptr) {
      std::fprintf(stderr, "[nnorm] the plugins are not registered: load %s into this process first\n", library);
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
