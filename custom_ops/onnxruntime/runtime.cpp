#include "runtime.h"

#include <algorithm>
#include <thread>

namespace nnorm::ort {

namespace {

// The status's message, with the attribute's name taken out. Releases the status.
std::string message_without(const OrtApi* api, OrtStatus* status, const char* attribute) {
  const Owner<OrtStatus> owner(status, api->ReleaseStatus);
  const std::string name = attribute;
  std::string message = api->GetErrorMessage(status);
  for (size_t at = message.find(name); at != std::string::npos; at = message.find(name, at)) message.erase(at, name.size());
  return message;
}

Tensor read_tensor(const OrtApi* api, const OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api, api->GetTensorTypeAndShape(value, &info));
  const Owner<OrtTensorTypeAndShapeInfo> owner(info, api->ReleaseTensorTypeAndShapeInfo);
  size_t rank = 0;
  check(api, api->GetDimensionsCount(info, &rank));
  Tensor tensor{Shape(rank), nullptr};
  check(api, api->GetDimensions(info, tensor.shape.data(), rank));
  void* data = nullptr;
  check(api, api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  tensor.data = data;
  return tensor;
}

}  // namespace

// ONNX Runtime reports a missing attribute and one of another type with the same error code. Only the messages differ, so
// this one is compared with that for an attribute that no node has.
template <class Get>
void Attributes::expect_missing(const char* name, const char* type, OrtStatus* status, Get get) const {
  const std::string message = message_without(api_, status, name);
  const char* const nobodys = "nnorm_attribute_of_no_node";
  OrtStatus* const of_missing = get(nobodys);
  if (of_missing == nullptr || message_without(api_, of_missing, nobodys) != message)
    refuse(std::string("attribute ") + name + " cannot be read (" + message + "); it must be " + type);
}

void Attributes::read(const char* name, int32_t& value) const {
  int64_t wide = value;
  const auto get = [&](const char* of) { return api_->KernelInfoGetAttribute_int64(info_, of, &wide); };
  if (OrtStatus* status = get(name)) return expect_missing(name, "an integer", status, get);
  if (wide != int32_t(wide))
    refuse(std::string("attribute ") + name + " is " + std::to_string(wide) + "; it must fit into 32 bits");
  value = int32_t(wide);
}

void Attributes::read(const char* name, float& value) const {
  float given = value;
  const auto get = [&](const char* of) { return api_->KernelInfoGetAttribute_float(info_, of, &given); };
  if (OrtStatus* status = get(name)) return expect_missing(name, "a float", status, get);
  value = given;
}

Tensor Attributes::constant(size_t input) const {
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api_, api_->KernelInfoGetConstantInput_tensor(info_, input, &is_constant, &value));
  return is_constant ? read_tensor(api_, value) : Tensor{};
}

Constants::Constants(const Attributes& attributes, size_t first, size_t count, size_t element_size) {
  for (size_t i = first; are_known_ && i < first + count; ++i) {
    Tensor& tensor = tensors_.emplace_back(attributes.constant(i));
    const auto* const bytes = tensor.as<char>();
    are_known_ = bytes != nullptr;
    if (are_known_) tensor.data = memory_.emplace_back(bytes, bytes + nnorm::count(tensor.shape) * element_size).data();
  }
  if (are_known_) return;
  tensors_.clear();
  memory_.clear();
}

Tensor Run::input(size_t index) const {
  const OrtValue* value = nullptr;
  check(api_, api_->KernelContext_GetInput(context_, index, &value));
  if (value == nullptr) refuse("input " + std::to_string(index) + " is missing; every input must be given");
  return read_tensor(api_, value);
}

std::vector<Tensor> Run::inputs(size_t first, size_t count) const {
  std::vector<Tensor> tensors;
  tensors.reserve(count);
  for (size_t i = first; i < first + count; ++i) tensors.push_back(input(i));
  return tensors;
}

void* Run::output(const Shape& shape) const {
  OrtValue* value = nullptr;
  check(api_, api_->KernelContext_GetOutput(context_, 0, shape.data(), shape.size(), &value));
  void* data = nullptr;
  check(api_, api_->GetTensorMutableData(value, &data));
  return data;
}

void Run::over_items(size_t items, void* call, void (*item)(void*, size_t), size_t fewest_to_share) const {
  if (items < fewest_to_share) {
    for (size_t i = 0; i < items; ++i) item(call, i);
    return;
  }
  // Four batches for each thread balance the load if one thread is slow; on a pool of one thread ONNX Runtime runs the
  // batches in sequence.
  check(api_, api_->KernelContext_ParallelFor(context_, item, items, std::min(items, 4 * machine_threads()), call));
}

size_t Run::machine_threads() {
  static const size_t threads = std::max(1u, std::thread::hardware_concurrency());
  return threads;
}

void* Run::gpu_stream() const {
  void* stream = nullptr;
  check(api_, api_->KernelContext_GetGPUComputeStream(context_, &stream));
  return stream;
}

}  // namespace nnorm::ort
