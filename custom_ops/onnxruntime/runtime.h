// ONNX Runtime's C API as the operators see it: errors are exceptions inside the library and statuses at its boundary.
//
// The operators are the same for every execution provider. cpu/ and cuda/ define `execution_provider` and Run::solve() for
// the library that they are linked into.
#pragma once

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nnorm/operators.h"

namespace nnorm::ort {

// A mistake of the caller, or an error that ONNX Runtime reported. guarded() keeps it inside this library.
struct Error {
  OrtErrorCode code;
  std::string message;
};

// Throws an Error with this reason, unless the reason is empty.
inline void refuse(const std::string& reason) {
  if (!reason.empty()) throw Error{ORT_INVALID_ARGUMENT, reason};
}

// Releases an object of ONNX Runtime at the end of the scope, whatever throws in between.
template <class T>
using Owner = std::unique_ptr<T, void(ORT_API_CALL*)(T*)>;

inline void check(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return;
  const Owner<OrtStatus> owner(status, api->ReleaseStatus);
  throw Error{api->GetErrorCode(status), api->GetErrorMessage(status)};
}

// Runs f; an exception becomes a status whose message starts with `where`.
template <class F>
OrtStatus* guarded(const OrtApi* api, const char* where, F f) noexcept {
  try {
    f();
    return nullptr;
  } catch (const Error& error) {
    try {
      return api->CreateStatus(error.code, (std::string(where) + ": " + error.message).c_str());
    } catch (...) {
    }
  } catch (...) {  // the standard library throws only std::bad_alloc here
  }
  return api->CreateStatus(ORT_FAIL, "nnorm: out of memory");
}

// The attributes of a node and its constant inputs, while its kernel is created.
class Attributes {
 public:
  Attributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}
  // Sets `value` to the attribute's; an attribute that the node lacks leaves it as it is. Throws Error if the attribute has
  // another type.
  void read(const char* name, int32_t& value) const;
  void read(const char* name, float& value) const;
  // The input's data and its shape; nullptr if the input is not a constant of the model.
  const void* constant(size_t input, Shape& shape) const;

 private:
  // Returns if `status`, of the function `get` for this attribute, means that the node lacks it, and throws otherwise.
  template <class Get>
  void expect_missing(const char* name, const char* type, OrtStatus* status, Get get) const;

  const OrtApi* api_;
  const OrtKernelInfo* info_;
};

// The name of the execution provider that this library has kernels for.
extern const char* const execution_provider;

// One run of a node: its tensors, and the threads or the stream that compute them.
class Run {
 public:
  Run(const OrtApi* api, OrtKernelContext* context) : api_(api), context_(context) {}

  // The first `count` inputs.
  Tensors inputs(size_t count) const;

  // The data of one input, and its shape.
  const void* input(size_t index, Shape& shape) const;

  // The memory of the output, which gets this shape.
  void* output(const Shape& shape) const;

  // Solves one of NNORM_FOR_EACH_PROBLEM, on the session's threads or on its CUDA stream.
  template <class Problem>
  void solve(const Problem& problem) const;

  // Waking a thread takes microseconds, as long as one or two items of elements_per_item.
  static constexpr size_t too_few_to_share = 4;

  // Computes the items 0, …, items − 1 of a call; `fewest_to_share` or more are distributed over the session's threads.
  void over_items(size_t items, void* call, void (*item)(void*, size_t), size_t fewest_to_share = too_few_to_share) const;

  // The threads of the machine. ONNX Runtime does not report how many of them the session has.
  static size_t machine_threads();

  // The stream of a session on a GPU.
  void* gpu_stream() const;

 private:
  const OrtApi* api_;
  OrtKernelContext* context_;
};

}  // namespace nnorm::ort
