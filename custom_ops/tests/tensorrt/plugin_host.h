// Opens the plugin library and calls it as TensorRT does.
#pragma once

#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "nnorm/operators.h"

namespace nnorm_test {
namespace {

using namespace nvinfer1;

struct OperatorFacts {
  std::string name;
  int inputs;
  bool any_layout;
};

// The operators that the library must have a plugin for.
std::vector<OperatorFacts> operators() {
  std::vector<OperatorFacts> result;
  nnorm::for_each_operator([&](auto declared) {
    using Operator = decltype(declared);
    result.push_back({Operator::name, int(1 + Operator::parameters.size() + Operator::operands), Operator::any_layout});
  });
  return result;
}

void* open_library(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::printf("%s\n", dlerror());
  return library;
}

class Library {
 public:
  explicit Library(const char* path) : library_(open_library(path)) {
    if (!CHECK(library_ != nullptr, "%s", path)) return;
    const auto get = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library_, "getCreators"));
    const auto set_finder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library_, "setLoggerFinder"));
    if (!CHECK(get != nullptr && set_finder != nullptr, "%s lacks a function", path)) return;
    set_finder(nullptr);
    int32_t count = 0;
    IPluginCreatorInterface* const* creators = get(count);
    for (int32_t i = 0; i < count; ++i) creators_.push_back(static_cast<IPluginCreatorV3One*>(creators[i]));
  }

  const std::vector<IPluginCreatorV3One*>& creators() const { return creators_; }

  IPluginCreatorV3One* creator(const std::string& name, const std::string& plugin_namespace = "nnorm") const {
    for (IPluginCreatorV3One* creator : creators_)
      if (creator->getPluginName() == name && creator->getPluginNamespace() == plugin_namespace) return creator;
    return nullptr;
  }

 private:
  void* library_;
  std::vector<IPluginCreatorV3One*> creators_;
};

struct Fields {
  int32_t axis = -1, num_groups = 2;
  float epsilon = 1e-5f, delta = 0.003f;
  std::vector<PluginField> fields{{"axis", &axis, PluginFieldType::kINT32, 1},
                                  {"num_groups", &num_groups, PluginFieldType::kINT32, 1},
                                  {"epsilon", &epsilon, PluginFieldType::kFLOAT32, 1},
                                  {"delta", &delta, PluginFieldType::kFLOAT32, 1},
                                  {"plugin_namespace", "nnorm", PluginFieldType::kCHAR, 6}};
  PluginFieldCollection collection{int32_t(fields.size()), fields.data()};
};

using PluginPointer = std::unique_ptr<IPluginV3>;

PluginPointer make(IPluginCreatorV3One* creator, const PluginFieldCollection& fields) {
  return PluginPointer(creator->createPlugin("node", &fields, TensorRTPhase::kBUILD));
}

template <class Capability>
Capability* capability(IPluginV3& plugin, PluginCapabilityType type) {
  return static_cast<Capability*>(plugin.getCapabilityInterface(type));
}
IPluginV3OneBuild* build(const PluginPointer& plugin) {
  return capability<IPluginV3OneBuild>(*plugin, PluginCapabilityType::kBUILD);
}
IPluginV3OneRuntime* runtime(const PluginPointer& plugin) {
  return capability<IPluginV3OneRuntime>(*plugin, PluginCapabilityType::kRUNTIME);
}

// The formats that the plugins of batch normalization take. They are repeated here because the plugin's list is under
// test.
inline std::vector<TensorFormat> formats_of(DataType type, int rank) {
  std::vector<TensorFormat> result{TensorFormat::kLINEAR};
  if (rank == 4) result.push_back(TensorFormat::kHWC);
  if (rank == 5) result.push_back(TensorFormat::kDHWC);
  if (rank == 4 && type != DataType::kFLOAT) result.push_back(TensorFormat::kHWC8);
  if (rank == 5 && type != DataType::kFLOAT) result.push_back(TensorFormat::kDHWC8);
  return result;
}

Dims dims(const std::vector<int64_t>& shape) {
  Dims result{};
  result.nbDims = int32_t(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) result.d[i] = shape[i];
  return result;
}

// A shape as TensorRT passes it before the network runs. An extent of -1 is still unknown.
class Expressions {
 public:
  explicit Expressions(const std::vector<int64_t>& shape) {
    dims_.nbDims = int32_t(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) {
      extents_.push_back(std::make_unique<Extent>(shape[i]));
      dims_.d[i] = extents_.back().get();
    }
  }
  const DimsExprs& dims() const { return dims_; }

 private:
  struct Extent final : IDimensionExpr {
    explicit Extent(int64_t value) : known(value) { mImpl = &known; }
    struct Known final : apiv::VDimensionExpr {
      explicit Known(int64_t extent) : value(extent) {}
      bool isConstant() const override { return value >= 0; }
      int64_t getConstantValue() const override { return value; }
      bool isSizeTensor() const override { return false; }
      int64_t value;
    } known;
  };
  DimsExprs dims_{};
  std::vector<std::unique_ptr<Extent>> extents_;
};

PluginTensorDesc description(const std::vector<int64_t>& shape, DataType type, TensorFormat format) {
  PluginTensorDesc result{};
  result.dims = dims(shape);
  result.type = type;
  result.format = format;
  return result;
}

}  // namespace
}  // namespace nnorm_test
