#include "plugin.h"

#include <cstdio>
#include <cstring>
#include <new>

namespace nnorm::trt {

using namespace nvinfer1;

namespace {

constexpr int32_t fine = 0, failure = -1;

// TensorRT's own logger is found in another place in TensorRT 11 than in 10, so reasons go where they are seen anyway.
int32_t fail(const Operation& operation, const std::string& reason) {
  std::fprintf(stderr, "[nnorm] %s: %s\n", operation.name, reason.c_str());
  return failure;
}

// Runs f; of the standard library it can only run out of memory.
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

// The layouts of tensors [N, C, H, W] and [N, C, D, H, W] that have channels last: of 32 bits as they are, of 16 bits in
// eights.
bool layout_of(TensorFormat format, DataType type, int32_t rank, Layout& result) {
  if (format == TensorFormat::kLINEAR) {
    result = Layout::contiguous;
    return true;
  }
  const bool wide = type == DataType::kFLOAT;
  result = wide ? Layout::channels_last : Layout::channels_last_by_8;
  return (rank == 4 && format == (wide ? TensorFormat::kHWC : TensorFormat::kHWC8)) ||
         (rank == 5 && format == (wide ? TensorFormat::kDHWC : TensorFormat::kDHWC8));
}

PluginField field_of(const Attribute& attribute, const Attributes* values) {
  const bool integer = attribute.integer != nullptr;
  const void* data = values == nullptr ? nullptr
                     : integer         ? static_cast<const void*>(&(values->*attribute.integer))
                                       : static_cast<const void*>(&(values->*attribute.real));
  return PluginField(attribute.name, data, integer ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32, 1);
}

PluginFieldCollection collection_of(const std::vector<PluginField>& fields) {
  return {int32_t(fields.size()), fields.data()};
}

// The field's number, if it is of this type.
template <class T, class Result>
bool number(const PluginField& field, PluginFieldType type, Result& result) {
  if (field.type != type) return false;
  result = *static_cast<const T*>(field.data);
  return true;
}

// What a field says; why it cannot be that of the attribute, or nothing.
std::string read(const PluginField& field, const Attribute& attribute, Attributes& result) {
  const std::string name = std::string("attribute ") + attribute.name;
  if (field.length != 1 || field.data == nullptr) return name + " must be one number";
  // The ONNX parser makes numbers of 32 bits, Python users of 64.
  int64_t integer = 0;
  double real = 0;
  const bool is_integer = number<int32_t>(field, PluginFieldType::kINT32, integer) ||
                          number<int64_t>(field, PluginFieldType::kINT64, integer);
  const bool is_real = number<float>(field, PluginFieldType::kFLOAT32, real) ||
                       number<double>(field, PluginFieldType::kFLOAT64, real);
  if (attribute.integer != nullptr && !is_integer) return name + " must be an integer";
  if (attribute.real != nullptr && !is_real) return name + " must be a real number";
  if (integer != int32_t(integer)) return name + " is " + std::to_string(integer) + ", which is beyond 32 bits";
  if (attribute.integer != nullptr)
    result.*attribute.integer = int32_t(integer);
  else
    result.*attribute.real = float(real);
  return "";
}

}  // namespace

Plugin::Plugin(const Operation& operation, const Attributes& attributes, const std::string& plugin_namespace)
    : operation_(operation), attributes_(attributes), namespace_(plugin_namespace), description_(operation.name) {
  for (const Attribute& attribute : operation.attributes) {
    fields_.push_back(field_of(attribute, &attributes_));
    char text[64];
    if (attribute.integer != nullptr)
      std::snprintf(text, sizeof text, " %s=%d", attribute.name, attributes_.*attribute.integer);
    else
      std::snprintf(text, sizeof text, " %s=%.9g", attribute.name, double(attributes_.*attribute.real));
    description_ += text;
  }
  collection_ = collection_of(fields_);
}

Plugin::Plugin(const Plugin& other) : Plugin(other.operation_, other.attributes_, other.namespace_) {}

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
  guarded(operation_, [&] {
    copy = new Plugin(*this);
    return fine;
  });
  return copy;
}

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                   int32_t input_count) const noexcept {
  if (input_count != operation_.inputs() || output_count != 1)
    return guarded(operation_, [&] {
      return fail(operation_, "takes " + std::to_string(operation_.inputs()) + " inputs and gives 1 output, the node has " +
                                  std::to_string(input_count) + " and " + std::to_string(output_count));
    });
  outputs[0] = inputs[0];
  return fine;
}

int32_t Plugin::getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs*, int32_t, DimsExprs* outputs,
                                int32_t output_count, IExprBuilder&) noexcept {
  if (input_count != operation_.inputs() || output_count != 1) return failure;
  outputs[0] = inputs[0];
  return fine;
}

bool Plugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t input_count,
                                       int32_t output_count) noexcept {
  if (input_count != operation_.inputs() || output_count != 1 || position < 0 || position > input_count) return false;
  const PluginTensorDesc &x = tensors[0].desc, &tensor = tensors[position].desc;
  if (position == 0) {
    Type type;
    Layout layout;
    return type_of(x.type, type) && layout_of(x.format, x.type, x.dims.nbDims, layout) &&
           (layout == Layout::contiguous || operation_.any_layout);
  }
  if (position <= operation_.parameters) return tensor.type == DataType::kFLOAT && tensor.format == TensorFormat::kLINEAR;
  return tensor.type == x.type && tensor.format == x.format;  // operands and Y
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc*, int32_t input_count, const DynamicPluginTensorDesc*,
                                int32_t output_count) noexcept {
  return input_count == operation_.inputs() && output_count == 1 ? fine : failure;
}

int32_t Plugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc*,
                              int32_t) noexcept {
  return guarded(operation_, [&] {
    std::vector<Shape> shapes;
    for (int32_t i = 0; i < input_count; ++i) shapes.push_back(shape_of(inputs[i].dims));
    const std::string reason = operation_.refusal(attributes_, shapes);
    return reason.empty() ? fine : fail(operation_, reason);
  });
}

int32_t Plugin::enqueue(const PluginTensorDesc* descriptions, const PluginTensorDesc*, const void* const* inputs,
                        void* const* outputs, void*, cudaStream_t stream) noexcept {
  return guarded(operation_, [&] {
    Tensors tensors{};
    const PluginTensorDesc& x = descriptions[0];
    if (!type_of(x.type, tensors.type) || !layout_of(x.format, x.type, x.dims.nbDims, tensors.layout))
      return fail(operation_, "X has a type or a format that was never offered");
    for (int32_t i = 0; i < operation_.inputs(); ++i) {
      tensors.shapes.push_back(shape_of(descriptions[i].dims));
      tensors.inputs.push_back(inputs[i]);
    }
    tensors.y = outputs[0];
    const cudaError_t error = operation_.run(attributes_, tensors, stream);
    return error == cudaSuccess ? fine : fail(operation_, std::string("CUDA: ") + cudaGetErrorString(error));
  });
}

Creator::Creator(const Operation& operation, const char* plugin_namespace)
    : operation_(operation), namespace_(plugin_namespace) {
  for (const Attribute& attribute : operation.attributes) fields_.push_back(field_of(attribute, nullptr));
  collection_ = collection_of(fields_);
}

IPluginV3* Creator::createPlugin(const char*, const PluginFieldCollection* fields, TensorRTPhase) noexcept {
  Plugin* plugin = nullptr;
  guarded(operation_, [&] {
    Attributes attributes;
    for (int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i)
      for (const Attribute& attribute : operation_.attributes) {
        const PluginField& field = fields->fields[i];
        if (field.name == nullptr || std::strcmp(field.name, attribute.name) != 0) continue;  // others say nothing to us
        const std::string reason = read(field, attribute, attributes);
        if (!reason.empty()) return fail(operation_, reason);
      }
    plugin = new Plugin(operation_, attributes, namespace_);
    return fine;
  });
  return plugin;
}

}  // namespace nnorm::trt
