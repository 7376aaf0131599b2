// A mock of a TensorRT library: a registry that records what is registered. It also reports calls of functions that
// registering does not need: they mean that the caller uses another version's table of functions. As TensorRT-RTX it
// reports the minor version in the environment variable NNORM_MOCK_MINOR.
#include <NvInferRuntime.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace {

using namespace nvinfer1;

std::string notes;

class Registry final : public IPluginRegistry {
 public:
#if NV_TENSORRT_MAJOR < 11
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // the table has functions for plugins of version 2
  bool registerCreator(IPluginCreator&, const AsciiChar* const) noexcept override { return wrong("registerCreator of V2"); }
  IPluginCreator* const* getPluginCreatorList(int32_t* const) const noexcept override { return nullptr; }
  IPluginCreator* getPluginCreator(const AsciiChar* const, const AsciiChar* const, const AsciiChar* const) noexcept override {
    wrong("getPluginCreator");
    return nullptr;
  }
  bool deregisterCreator(const IPluginCreator&) noexcept override { return wrong("deregisterCreator of V2"); }
#pragma GCC diagnostic pop
#endif
  void setErrorRecorder(IErrorRecorder* const) noexcept override { wrong("setErrorRecorder"); }
  IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
  bool isParentSearchEnabled() const override { return false; }
  void setParentSearchEnabled(const bool) override { wrong("setParentSearchEnabled"); }
  PluginLibraryHandle loadLibrary(const AsciiChar*) noexcept override {
    wrong("loadLibrary");
    return nullptr;
  }
  void deregisterLibrary(PluginLibraryHandle) noexcept override { wrong("deregisterLibrary"); }
  bool registerCreator(IPluginCreatorInterface& creator, const AsciiChar* const plugin_namespace) noexcept override {
    const auto& one = static_cast<IPluginCreatorV3One&>(creator);
    notes += std::string(plugin_namespace) + "::" + one.getPluginName() + " ";
    creators_.push_back(&creator);
    return true;
  }
  IPluginCreatorInterface* const* getAllCreators(int32_t* const count) const noexcept override {
    *count = int32_t(creators_.size());
    return creators_.data();
  }
  IPluginCreatorInterface* getCreator(const AsciiChar* const, const AsciiChar* const, const AsciiChar* const) noexcept override {
    wrong("getCreator");
    return nullptr;
  }
  bool deregisterCreator(const IPluginCreatorInterface&) noexcept override { return wrong("deregisterCreator"); }
  IPluginResource* acquirePluginResource(const AsciiChar*, IPluginResource*) noexcept override {
    wrong("acquirePluginResource");
    return nullptr;
  }
  int32_t releasePluginResource(const AsciiChar*) noexcept override { return 0; }
#if NV_TENSORRT_MAJOR > 10 || NV_TENSORRT_MINOR > 0
  IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* const) noexcept override { return nullptr; }
#endif

 private:
  static bool wrong(const char* function) {
    notes += std::string("WRONG:") + function + " ";
    return false;
  }

  std::vector<IPluginCreatorInterface*> creators_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) IPluginRegistry* getPluginRegistry() noexcept {
  static Registry registry;
  return &registry;
}

extern "C" __attribute__((visibility("default"))) int32_t getInferLibMinorVersion() noexcept {
  const char* const minor = std::getenv("NNORM_MOCK_MINOR");
  return minor == nullptr ? 0 : std::atoi(minor);
}

// The plugins that were registered, each as "namespace::Name ".
extern "C" __attribute__((visibility("default"))) const char* mock_nvinfer_notes() { return notes.c_str(); }
