// Wraps ONNX Runtime's C API for the operators: errors are exceptions inside the library and statuses at its boundary.
//
// The operators are the same for every execution provider. cpu/ and cuda/ define `device_of_tensors` and
// Run::solve() for the library that they are linked into.
#pragma once

#include <onnxruntime_c_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nnorm/operators.h"

namespace nnorm::ort {

// An invalid argument, or an error that ONNX Runtime reported. guarded() keeps it inside this library.
struct Error {
  OrtErrorCode code;
  std::string message;
};

// Throws an Error with this reason, unless the reason is empty.
inline void refuse(const std::string& reason) {
  if (!reason.empty()) throw Error{ORT_INVALID_ARGUMENT, reason};
}

// Releases an object of ONNX Runtime at the end of the scope, also after an exception.
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
  // Sets `value` to the attribute's value, or leaves it unchanged if the node lacks the attribute. Throws Error if the
  // attribute has another type.
  void read(const char* name, int32_t& value) const;
  void read(const char* name, float& value) const;
  // The input. Its data is nullptr if it is not a constant of the model, has no elements or elements of another type,
  // or is in another memory than the tensors that this library computes.
  Tensor constant(size_t input, ONNXTensorElementDataType type) const;

 private:
  // Returns if `status`, which get(name) returned, means that the node lacks the attribute. Throws Error otherwise.
  template <class Get>
  void expect_missing(const char* name, const char* type, OrtStatus* status, Get get) const;

  const OrtApi* api_;
  const OrtKernelInfo* info_;
};

// Where the tensors are that this library computes.
extern const OrtMemoryInfoDeviceType device_of_tensors;

// Which inputs of a node are tensors of X's shape (the others are parameters), and the types of all inputs.
struct Roles {
  size_t inputs;
  bool (*is_tensor)(size_t input);
  ONNXTensorElementDataType (*type)(size_t input);
};

class Run;

// A node's parameters, if all of them are constants of the model. Reading and preparing the parameters of
// BatchNormalNorm in each run takes 0.9 µs, in which its kernel computes 1,500 elements.
class Constants {
 public:
  Constants(const Attributes& attributes, Roles roles);
  bool are_known() const { return !tensors_.empty(); }

  // Whether this run's parameters are these constants. ONNX Runtime 1.29 and newer may give a kernel in a branch or a
  // loop a constant of an outer graph, although a graph between them computes a value of the same name.
  bool are_inputs_of(const Run& run) const;

  // The inputs of the node, in ONNX Runtime's memory. X and tensors of its shape are empty.
  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  Roles roles_;
  std::vector<Tensor> tensors_;
};

// What a node makes from its constants, in the first run that can. A session may run in several threads.
class MadeOnce {
 public:
  // make() returns a std::shared_ptr<const Made>: nullptr if this run cannot make it. Made is the same in all calls.
  template <class Made, class Make>
  const Made* get(Make make) {
    if (!is_made_.load(std::memory_order_acquire)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (made_ == nullptr) made_ = make();
      if (made_ == nullptr) return nullptr;
      is_made_.store(true, std::memory_order_release);
    }
    return static_cast<const Made*>(made_.get());
  }

 private:
  std::atomic<bool> is_made_ = false;
  std::mutex mutex_;
  std::shared_ptr<const void> made_;
};

// One run of a node: its tensors, and the threads or the stream that compute it.
class Run {
 public:
  Run(const OrtApi* api, OrtKernelContext* context) : api_(api), context_(context) {}

  Tensor input(size_t index) const;

  // The address of the input's elements; nullptr if the input is missing.
  const void* data(size_t index) const;

  // The parameters among the inputs. X and tensors of its shape are empty.
  std::vector<Tensor> parameters(Roles roles) const;

  // Gives the output this shape and returns its memory.
  void* output(const Shape& shape) const;

  // Solves one of NNORM_FOR_EACH_PROBLEM on the session's threads or on its CUDA stream. `prepared` holds what is
  // prepared from the parameters once; it is nullptr if they may change.
  template <class Problem>
  void solve(const Problem& problem, MadeOnce* prepared) const;

  // Waking a thread takes microseconds, as long as one or two items of elements_per_item.
  static constexpr size_t fewest_items_to_share = 4;

  // Computes the items 0, …, items − 1 of a call. If there are at least `fewest_to_share`, the session's threads share
  // them.
  void over_items(size_t items, void* call, void (*item)(void*, size_t), size_t fewest_to_share = fewest_items_to_share) const;

  // The number of threads of the machine. ONNX Runtime does not report how many the session has.
  static size_t machine_threads();

  // The stream of a session on a GPU.
  void* gpu_stream() const;

  // Memory of the session, where input `beside` is. It may be kept until the session ends.
  std::shared_ptr<void> allocate(size_t bytes, size_t beside) const;

 private:
  const OrtApi* api_;
  OrtKernelContext* context_;
};

}  // namespace nnorm::ort
