// ONNX Runtime's C API as the operators see it: errors as exceptions inside, as statuses at the boundary.
//
// The operators are the same for every execution provider; cpu/ and cuda/ say what a library's provider is called and
// how it solves a problem.
#pragma once

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "nnorm/operators.h"

namespace nnorm::ort {

// What a caller did wrong, or what ONNX Runtime reported. Never leaves this library: see guarded().
struct Error {
  OrtErrorCode code;
  std::string message;
};

// Throws, unless there is nothing to say.
inline void refuse(const std::string& reason) {
  if (!reason.empty()) throw Error{ORT_INVALID_ARGUMENT, reason};
}

inline void check(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return;
  Error error{api->GetErrorCode(status), api->GetErrorMessage(status)};
  api->ReleaseStatus(status);
  throw error;
}

// Runs f; whatever it throws becomes a status whose message starts with `where`.
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
  } catch (...) {  // of the standard library only running out of memory can happen
  }
  return api->CreateStatus(ORT_FAIL, "nnorm: out of memory");
}

// The attributes of a node, while its kernel is made.
class Attributes {
 public:
  Attributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}
  // A missing attribute has the default that the body gives it (nnorm_export/operators).
  int64_t integer(const char* name, int64_t missing) const;
  float real(const char* name, float missing) const;

 private:
  const OrtApi* api_;
  const OrtKernelInfo* info_;
};

// The execution provider that this library has kernels for.
extern const char* const execution_provider;

// One run of a node: its tensors, and what computes them.
class Run {
 public:
  Run(const OrtApi* api, OrtKernelContext* context) : api_(api), context_(context) {}

  // Input `index`, and its shape as the next of `shapes`.
  template <class T>
  const T* input(size_t index, std::vector<Shape>& shapes) const {
    return static_cast<const T*>(input(index, shapes.emplace_back()));
  }

  template <class T>
  T* output(const Shape& shape) const {
    return static_cast<T*>(output(shape));
  }

  // With the session's threads, or on the stream that the session's kernels follow each other on.
  template <class T>
  void solve(const ChannelProblem<T>& problem) const;
  template <class T>
  void solve(const RowProblem<T>& problem) const;

  // The items 0, …, items − 1 of a call, spread over the session's threads where there is enough to do.
  void over_items(size_t items, void* call, void (*item)(void*, size_t)) const;

  // The stream of a session on a GPU.
  void* gpu_stream() const;

 private:
  const void* input(size_t index, Shape& shape) const;
  void* output(const Shape& shape) const;

  const OrtApi* api_;
  OrtKernelContext* context_;
};

}  // namespace nnorm::ort
