#include "runtime.h"

#include <algorithm>
#include <new>
#include <thread>

namespace nnorm::ort {

namespace {

// The message of the status, without the name of the attribute. Releases the status.
std::string message_without(const OrtApi* api, OrtStatus* status, const char* attribute) {
  const Owner<OrtStatus> owner(status, api->ReleaseStatus);
  const std::string name = attribute;
  std::string message = api->GetErrorMessage(status);
  for (size_t at = message.find(name); at != std::string::npos; at = message.find(name, at)) message.erase(at, name.size());
  return message;
}

void* data_of(const OrtApi* api, const OrtValue* value) {
  void* data = nullptr;
  check(api, api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return data;
}

ONNXTensorElementDataType type_of(const OrtApi* api, const OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api, api->GetTensorTypeAndShape(value, &info));
  const Owner<OrtTensorTypeAndShapeInfo> owner(info, api->ReleaseTensorTypeAndShapeInfo);
  ONNXTensorElementDataType type;
  check(api, api->GetTensorElementType(info, &type));
  return type;
}

Tensor read_tensor(const OrtApi* api, const OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api, api->GetTensorTypeAndShape(value, &info));
  const Owner<OrtTensorTypeAndShapeInfo> owner(info, api->ReleaseTensorTypeAndShapeInfo);
  size_t rank = 0;
  check(api, api->GetDimensionsCount(info, &rank));
  Tensor tensor{Shape(rank), nullptr};
  check(api, api->GetDimensions(info, tensor.shape.data(), rank));
  tensor.data = data_of(api, value);
  return tensor;
}

}  // namespace

// ONNX Runtime reports a missing attribute and an attribute of another type with the same error code. Only the messages
// differ, so the message is compared with that for an attribute that no node has.
template <class Get>
void Attributes::expect_missing(const char* name, const char* type, OrtStatus* status, Get get) const {
  const std::string message = message_without(api_, status, name);
  const char* const missing = "nnorm_attribute_of_no_node";
  OrtStatus* const of_missing = get(missing);
  if (of_missing == nullptr || message_without(api_, of_missing, missing) != message)
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

Tensor Attributes::constant(size_t input, ONNXTensorElementDataType type) const {
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api_, api_->KernelInfoGetConstantInput_tensor(info_, input, &is_constant, &value));
  if (!is_constant) return {};
  // A constant is in the memory from which the nodes of its own graph read it. A branch may have nodes on another
  // provider.
  const OrtMemoryInfo* memory = nullptr;
  check(api_, api_->GetTensorMemoryInfo(value, &memory));
  OrtMemoryInfoDeviceType device;
  api_->MemoryInfoGetDeviceType(memory, &device);
  return device == device_of_tensors && type_of(api_, value) == type ? read_tensor(api_, value) : Tensor{};
}

Constants::Constants(const Attributes& attributes, Roles roles) : roles_(roles) {
  for (size_t i = 0; i < roles.inputs; ++i) {
    tensors_.push_back(roles.is_tensor(i) ? Tensor{} : attributes.constant(i, roles.type(i)));
    if (roles.is_tensor(i) || tensors_.back().data != nullptr) continue;
    tensors_.clear();
    return;
  }
}

bool Constants::are_inputs_of(const Run& run) const {
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (!roles_.is_tensor(i) && run.data(i) != tensors_[i].data) return false;
  return are_known();
}

Tensor Run::input(size_t index) const {
  const OrtValue* value = nullptr;
  check(api_, api_->KernelContext_GetInput(context_, index, &value));
  if (value == nullptr) refuse("input " + std::to_string(index) + " is missing; every input must be given");
  return read_tensor(api_, value);
}

const void* Run::data(size_t index) const {
  const OrtValue* value = nullptr;
  check(api_, api_->KernelContext_GetInput(context_, index, &value));
  return value == nullptr ? nullptr : data_of(api_, value);
}

std::vector<Tensor> Run::parameters(Roles roles) const {
  std::vector<Tensor> tensors;
  tensors.reserve(roles.inputs);
  for (size_t i = 0; i < roles.inputs; ++i) tensors.push_back(roles.is_tensor(i) ? Tensor{} : input(i));
  return tensors;
}

void* Run::output(const Shape& shape) const {
  OrtValue* value = nullptr;
  check(api_, api_->KernelContext_GetOutput(context_, 0, shape.data(), shape.size(), &value));
  return data_of(api_, value);
}

void Run::over_items(size_t items, void* call, void (*item)(void*, size_t), size_t fewest_to_share) const {
  if (items < fewest_to_share) {
    for (size_t i = 0; i < items; ++i) item(call, i);
    return;
  }
  // Four batches for each thread balance the load if one thread is slow. If the pool has one thread, ONNX Runtime runs
  // the batches in sequence.
  check(api_, api_->KernelContext_ParallelFor(context_, item, items, std::min(items, 4 * machine_threads()), call));
}

size_t Run::machine_threads() {
  static const size_t threads = std::max(1u, std::thread::hardware_concurrency());
  return threads;
}

std::shared_ptr<void> Run::allocate(size_t bytes, size_t beside) const {
  const OrtValue* value = nullptr;
  check(api_, api_->KernelContext_GetInput(context_, beside, &value));
  const OrtMemoryInfo* memory = nullptr;
  check(api_, api_->GetTensorMemoryInfo(value, &memory));
  OrtAllocator* found = nullptr;
  check(api_, api_->KernelContext_GetAllocator(context_, memory, &found));
  const std::shared_ptr<OrtAllocator> allocator(found, api_->ReleaseAllocator);
  void* const allocated = allocator->Alloc(allocator.get(), bytes);  // throws if the session has no memory, or returns this
  if (allocated == nullptr) throw std::bad_alloc();
  return std::shared_ptr<void>(allocated, [allocator](void* its) { allocator->Free(allocator.get(), its); });
}

void* Run::gpu_stream() const {
  void* stream = nullptr;
  check(api_, api_->KernelContext_GetGPUComputeStream(context_, &stream));
  return stream;
}

}  // namespace nnorm::ort
