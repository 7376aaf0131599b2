#include "plugin.h"

#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "nnorm/same_bits.h"
#include "runtimes.h"

namespace nnorm::trt {

using namespace nvinfer1;

namespace {

constexpr int32_t fine = 0, failure = -1;

// Prints to stderr: the logger's interface differs between TensorRT 10 and 11, and the plugin serves both.
int32_t fail(const Operation& operation, const std::string& reason) {
  std::fprintf(stderr, "[nnorm] %s: %s\n", operation.name, reason.c_str());
  return failure;
}

// Runs f. In f the standard library throws only std::bad_alloc.
template <class F>
int32_t guarded(const Operation& operation, F f) noexcept {
  try {
    return f();
  } catch (...) {
    std::fprintf(stderr, "[nnorm] %s: out of memory\n", operation.name);
    return failure;
  }
}

Shape shape_of(const Dims& dims) { return Shape(dims.d, dims.d + dims.nbDims); }

// An extent that is unknown before the network runs is -1, as in TensorRT's shapes.
Shape shape_of(const DimsExprs& dims) {
  Shape shape;
  for (int32_t i = 0; i < dims.nbDims; ++i) shape.push_back(dims.d[i]->isConstant() ? dims.d[i]->getConstantValue() : -1);
  return shape;
}

// Checks the shapes of all inputs, which shape_of_input(i) returns. Shapes that are still unknown are accepted.
template <class F>
int32_t check_shapes(const Operation& operation, F shape_of_input) {
  std::vector<Tensor> inputs;
  for (int32_t i = 0; i < operation.inputs(); ++i) {
    inputs.push_back({shape_of_input(i), nullptr});
    for (const int64_t extent : inputs.back().shape)
      if (extent == -1) return fine;
  }
  const std::string reason = operation.shape_refusal(inputs);
  return reason.empty() ? fine : fail(operation, reason);
}

bool type_of(DataType type, Type& result) {
  switch (type) {
    case DataType::kFLOAT:
      result = Type::float32;
      return true;
    case DataType::kHALF:
      result = Type::float16;
      return true;
    case DataType::kBF16:
      result = Type::bfloat16;
      return true;
    default:
      return false;
  }
}

// Sets `result` to the layout, or returns false if the kernels do not have it. Tensors [N, C, H, W] and [N, C, D, H, W]
// may have their channels last; 16-bit tensors also with the channels padded to a multiple of 8.
bool layout_of(TensorFormat format, DataType type, int32_t rank, Layout& result) {
  switch (format) {
    case TensorFormat::kLINEAR:
      result = Layout::contiguous;
      return true;
    case TensorFormat::kHWC:  // TensorRT's headers allow 32 bits; TensorRT-RTX has it for float16 too
      result = Layout::channels_last;
      return rank == 4;
    case TensorFormat::kDHWC:
      result = Layout::channels_last;
      return rank == 5;
    case TensorFormat::kHWC8:
      result = Layout::channels_last_by_8;
      return rank == 4 && type != DataType::kFLOAT;
    case TensorFormat::kDHWC8:
      result = Layout::channels_last_by_8;
      return rank == 5 && type != DataType::kFLOAT;
    default:
      return false;
  }
}

// Whether the builder takes the first format that it is offered. TensorRT-RTX does; TensorRT measures all formats. In a
// process that has both, all formats are offered.
bool builder_takes_first_format() {
  const auto have = [](const char* library) {
    void* const handle = loaded(library);
    if (handle != nullptr) dlclose(handle);
    return handle != nullptr;
  };
  return have(rtx_library) && !have("libnvinfer.so.10") && !have("libnvinfer.so.11");
}

// The format of the tensors next to a convolution of TensorRT-RTX 1.7, which transposes tensors of other formats. It
// never asks for bfloat16 with the channels last, except for padded channels, which it would copy.
TensorFormat format_beside_convolution(const PluginTensorDesc& x) {
  return x.dims.nbDims == 4 && x.type != DataType::kBF16 ? TensorFormat::kHWC : TensorFormat::kLINEAR;
}

PluginFieldType type_of(const Attribute& attribute) {
  return std::holds_alternative<int32_t*>(attribute.value) ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32;
}

PluginField field_of(const Attribute& attribute) {
  const void* data = std::visit([](auto* value) { return static_cast<const void*>(value); }, attribute.value);
  return PluginField(attribute.name, data, type_of(attribute), 1);
}

PluginFieldCollection collection_of(const std::vector<PluginField>& fields) {
  return {int32_t(fields.size()), fields.data()};
}

// Sets `result` to the field's number and returns true if the field has this type.
template <class T, class Result>
bool number(const PluginField& field, PluginFieldType type, Result& result) {
  if (field.type != type) return false;
  result = *static_cast<const T*>(field.data);
  return true;
}

// Sets the attribute to the field's value. Returns why it cannot, or an empty string.
std::string read(const PluginField& field, const Attribute& attribute) {
  const std::string name = std::string("attribute ") + attribute.name;
  if (field.length != 1 || field.data == nullptr) return name + " must be one number";
  // The ONNX parser creates 32-bit numbers, Python users create 64-bit numbers.
  if (int32_t* const* integer = std::get_if<int32_t*>(&attribute.value)) {
    int64_t value = 0;
    if (!number<int32_t>(field, PluginFieldType::kINT32, value) && !number<int64_t>(field, PluginFieldType::kINT64, value))
      return name + " must be an integer";
    if (value != int32_t(value)) return name + " is " + std::to_string(value) + "; it must fit into 32 bits";
    **integer = int32_t(value);
  } else {
    double value = 0;
    if (!number<float>(field, PluginFieldType::kFLOAT32, value) && !number<double>(field, PluginFieldType::kFLOAT64, value))
      return name + " must be a real number";
    *std::get<float*>(attribute.value) = float(value);
  }
  return "";
}

// " name=value" for error messages, logs and TensorRT's timing cache.
std::string described(const Attribute& attribute) {
  char text[64];
  if (int32_t* const* integer = std::get_if<int32_t*>(&attribute.value))
    std::snprintf(text, sizeof text, " %s=%d", attribute.name, **integer);
  else
    std::snprintf(text, sizeof text, " %s=%.9g", attribute.name, double(*std::get<float*>(attribute.value)));
  return text;
}

}  // namespace

Plugin::Plugin(std::unique_ptr<Operation> operation, const std::string& plugin_namespace)
    : operation_(std::move(operation)), namespace_(plugin_namespace), description_(operation_->name) {
  for (const Attribute& attribute : operation_->attributes()) {
    fields_.push_back(field_of(attribute));
    description_ += described(attribute);
  }
  collection_ = collection_of(fields_);
}

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  switch (type) {
    case PluginCapabilityType::kCORE:
      return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD:
      return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME:
      return static_cast<IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

IPluginV3* Plugin::clone() noexcept {
  Plugin* copy = nullptr;
  guarded(*operation_, [&] {
    copy = new Plugin(operation_->clone(), namespace_);
    return fine;
  });
  return copy;
}

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                   int32_t input_count) const noexcept {
  if (input_count != operation_->inputs() || output_count != 1)
    return guarded(*operation_, [&] {
      return fail(*operation_, "the node must have " + std::to_string(operation_->inputs()) + " inputs and 1 output, it has " +
                                   std::to_string(input_count) + " and " + std::to_string(output_count));
    });
  outputs[0] = inputs[0];
  return fine;
}

int32_t Plugin::getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs*, int32_t, DimsExprs* outputs,
                                int32_t output_count, IExprBuilder&) noexcept {
  if (input_count != operation_->inputs() || output_count != 1) return failure;
  outputs[0] = inputs[0];
  // An error here is reported with the name of the node. configurePlugin() checks the shapes that are still unknown.
  return guarded(*operation_, [&] { return check_shapes(*operation_, [&](int32_t i) { return shape_of(inputs[i]); }); });
}

bool Plugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t input_count,
                                       int32_t output_count) noexcept {
  if (input_count != operation_->inputs() || output_count != 1 || position < 0 || position > input_count) return false;
  const PluginTensorDesc &x = tensors[0].desc, &tensor = tensors[position].desc;
  if (position == 0) {
    Type type;
    Layout layout;
    if (!type_of(x.type, type) || !layout_of(x.format, x.type, x.dims.nbDims, layout)) return false;
    if (!operation_->any_layout) return layout == Layout::contiguous;
    return !builder_takes_first_format() || x.format == format_beside_convolution(x);
  }
  if (position <= operation_->parameters) return tensor.type == DataType::kFLOAT && tensor.format == TensorFormat::kLINEAR;
  return tensor.type == x.type && tensor.format == x.format;  // operands and Y
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count, const DynamicPluginTensorDesc*,
                                int32_t output_count) noexcept {
  if (input_count != operation_->inputs() || output_count != 1) return failure;
  return guarded(*operation_, [&] {
    for (const auto bound : {&DynamicPluginTensorDesc::min, &DynamicPluginTensorDesc::opt, &DynamicPluginTensorDesc::max})
      if (check_shapes(*operation_, [&](int32_t i) { return shape_of(inputs[i].*bound); }) != fine) return failure;
    return fine;
  });
}

int32_t Plugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc*,
                              int32_t) noexcept {
  if (input_count != operation_->inputs()) return failure;
  return guarded(*operation_, [&] { return check_shapes(*operation_, [&](int32_t i) { return shape_of(inputs[i].dims); }); });
}

int32_t Plugin::enqueue(const PluginTensorDesc* descriptions, const PluginTensorDesc*, const void* const* inputs,
                        void* const* outputs, void*, cudaStream_t stream) noexcept {
  return guarded(*operation_, [&] {
    Type type;
    Layout layout;
    const PluginTensorDesc& x = descriptions[0];
    if (!type_of(x.type, type) || !layout_of(x.format, x.type, x.dims.nbDims, layout))
      return fail(*operation_, "X has a type or a format that supportsFormatCombination() refuses; build the engine again");
    std::vector<Tensor> tensors;
    for (int32_t i = 0; i < operation_->inputs(); ++i) tensors.push_back({shape_of(descriptions[i].dims), inputs[i]});
    const cudaError_t error = operation_->run(tensors, outputs[0], type, layout, stream);
    return error == cudaSuccess ? fine : fail(*operation_, std::string("CUDA: ") + cudaGetErrorString(error));
  });
}

Creator::Creator(Operation& operation, const char* plugin_namespace)
    : operation_(operation), namespace_(plugin_namespace) {
  for (const Attribute& attribute : operation.attributes())
    fields_.push_back(PluginField(attribute.name, nullptr, type_of(attribute), 1));
  collection_ = collection_of(fields_);
}

IPluginV3* Creator::createPlugin(const char*, const PluginFieldCollection* fields, TensorRTPhase) noexcept {
  Plugin* plugin = nullptr;
  guarded(operation_, [&] {
    std::unique_ptr<Operation> operation = operation_.clone();
    for (const Attribute& attribute : operation->attributes())
      for (int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i) {
        const PluginField& field = fields->fields[i];
        if (field.name == nullptr || std::strcmp(field.name, attribute.name) != 0) continue;
        const std::string reason = read(field, attribute);
        if (!reason.empty()) return fail(operation_, reason);
      }
    for (const std::string& reason : {operation->attribute_refusal(), same_bits_refusal()})
      if (!reason.empty()) return fail(operation_, reason);
    plugin = new Plugin(std::move(operation), namespace_);
    return fine;
  });
  return plugin;
}

}  // namespace nnorm::trt
