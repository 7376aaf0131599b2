// An operator as a TensorRT plugin. One binary serves TensorRT 10 and 11: it uses only interfaces that both have, and
// calls no function of TensorRT's library.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "operation.h"

namespace nnorm::trt {

constexpr const char* plugin_version = "1";

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  Plugin(std::unique_ptr<Operation> operation, const std::string& plugin_namespace);

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  const char* getPluginName() const noexcept override { return operation_->name; }
  const char* getPluginVersion() const noexcept override { return plugin_version; }
  const char* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t output_count, const nvinfer1::DataType* inputs,
                             int32_t input_count) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t input_count, const nvinfer1::DimsExprs* shape_inputs,
                          int32_t shape_input_count, nvinfer1::DimsExprs* outputs, int32_t output_count,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t input_count,
                                 int32_t output_count) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t input_count,
                          const nvinfer1::DynamicPluginTensorDesc* outputs, int32_t output_count) noexcept override;
  const char* getTimingCacheID() noexcept override { return description_.c_str(); }
  const char* getMetadataString() noexcept override { return description_.c_str(); }

  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t input_count,
                        const nvinfer1::PluginTensorDesc* outputs, int32_t output_count) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descriptions, const nvinfer1::PluginTensorDesc* output_descriptions,
                  const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

 private:
  const std::unique_ptr<Operation> operation_;
  std::string namespace_, description_;
  std::vector<nvinfer1::PluginField> fields_;  // they point into operation_
  nvinfer1::PluginFieldCollection collection_{};
};

// Creates the plugins of one operator.
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator(Operation& operation, const char* plugin_namespace);

  const char* getPluginName() const noexcept override { return operation_.name; }
  const char* getPluginVersion() const noexcept override { return plugin_version; }
  const char* getPluginNamespace() const noexcept override { return namespace_; }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override;

 private:
  const Operation& operation_;
  const char* namespace_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace nnorm::trt
