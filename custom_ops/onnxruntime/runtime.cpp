#include "runtime.h"

#include <algorithm>
#include <thread>

namespace nnorm::ort {

int64_t Attributes::integer(const char* name, int64_t missing) const {
  int64_t value = missing;
  if (OrtStatus* status = api_->KernelInfoGetAttribute_int64(info_, name, &value)) {
    api_->ReleaseStatus(status);
    return missing;
  }
  return value;
}

float Attributes::real(const char* name, float missing) const {
  float value = missing;
  if (OrtStatus* status = api_->KernelInfoGetAttribute_float(info_, name, &value)) {
    api_->ReleaseStatus(status);
    return missing;
  }
  return value;
}

const void* Run::input(size_t index, Shape& shape) const {
  const OrtValue* value = nullptr;
  check(api_, api_->KernelContext_GetInput(context_, index, &value));
  if (value == nullptr) refuse("input " + std::to_string(index) + " is missing; every input must be given");
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api_, api_->GetTensorTypeAndShape(value, &info));
  size_t rank = 0;
  OrtStatus* status = api_->GetDimensionsCount(info, &rank);
  if (status == nullptr) {
    shape.resize(rank);
    status = api_->GetDimensions(info, shape.data(), rank);
  }
  api_->ReleaseTensorTypeAndShapeInfo(info);
  check(api_, status);
  void* data = nullptr;
  check(api_, api_->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return data;
}

void* Run::output(const Shape& shape) const {
  OrtValue* value = nullptr;
  check(api_, api_->KernelContext_GetOutput(context_, 0, shape.data(), shape.size(), &value));
  void* data = nullptr;
  check(api_, api_->GetTensorMutableData(value, &data));
  return data;
}

void Run::over_items(size_t items, void* call, void (*item)(void*, size_t)) const {
  // Waking a thread takes microseconds, as long as an item or two.
  constexpr size_t too_few_to_share = 4;
  if (items < too_few_to_share) {
    for (size_t i = 0; i < items; ++i) item(call, i);
    return;
  }
  // How many threads the session has cannot be asked. Four batches for each that the machine has even out what
  // disturbs one of them; on a pool of one thread ONNX Runtime runs them in a row.
  static const size_t batches = 4 * std::max(1u, std::thread::hardware_concurrency());
  check(api_, api_->KernelContext_ParallelFor(context_, item, items, std::min(items, batches), call));
}

void* Run::gpu_stream() const {
  void* stream = nullptr;
  check(api_, api_->KernelContext_GetGPUComputeStream(context_, &stream));
  return stream;
}

}  // namespace nnorm::ort
