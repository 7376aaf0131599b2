// A fake ONNX Runtime: the functions of its API that the library uses. Each of them can be made to fail, and so can
// every allocation of the library. Objects that the library must release are counted.
#pragma once

#include <onnxruntime_c_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "../failing/failing.h"
#include "nnorm/operators.h"

namespace nnorm_test::host {

using nnorm::Shape;

struct Status {
  OrtErrorCode code;
  std::string message;
};

struct Info {
  Shape shape;
  std::vector<std::string> names;  // of the axes, for shape inference
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
};

struct Tensor {
  Shape shape;
  void* data;
  bool on_gpu = false;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // of a constant
};

using Attribute = std::variant<int64_t, float, std::string>;
using Node = std::map<std::string, Attribute>;

struct Context {
  std::vector<Tensor> inputs;
  Tensor output;          // its data is what the library gets
  size_t refused_from;    // an output of this many elements or more cannot be allocated
  bool output_made = false;
};

struct InferenceContext {
  Info input;  // of every input
  bool published = false;
  Info output = {};
};

struct Domain {
  std::vector<const OrtCustomOp*> operators;
};

// The number of items of each call that distributes items over threads.
inline std::vector<size_t> handed_out;

// The inputs of nodes that are constants.
inline std::map<std::pair<const OrtKernelInfo*, size_t>, Tensor> constants;

// The stream of sessions on a GPU.
inline void* gpu_stream = nullptr;

inline long live_statuses = 0, live_infos = 0, live_domains = 0, live_allocators = 0, live_allocations = 0;

// Memory of a session: an allocator as the library gets it, which has little of it.
struct Allocator : OrtAllocator {
  static constexpr size_t most = 1 << 20;

  Allocator() : OrtAllocator{} {
    version = ORT_API_VERSION;
    Alloc = [](OrtAllocator*, size_t bytes) noexcept -> void* {
      const Outside outside;
      if (bytes > most) return nullptr;
      ++live_allocations;
      return std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    };
    Free = [](OrtAllocator*, void* memory) noexcept {
      --live_allocations;
      std::free(memory);
    };
  }
};

// The number of the API call that fails, counted from now on; 0 for none.
inline long failing_call = 0;

inline OrtStatus* status_of(OrtErrorCode code, const char* message) {
  const Outside outside;
  ++live_statuses;
  return reinterpret_cast<OrtStatus*>(new Status{code, message});
}

// The error of a call that is made to fail, else nullptr.
inline OrtStatus* injected() {
  if (failing_call == 0 || --failing_call != 0) return nullptr;
  made_to_fail = true;
  return status_of(ORT_EP_FAIL, "made to fail");
}

inline const Info& info_of(const OrtTensorTypeAndShapeInfo* info) { return *reinterpret_cast<const Info*>(info); }

template <class T>
OrtStatus* attribute(const OrtKernelInfo* info, const char* name, T* value) {
  const Outside outside;
  if (OrtStatus* status = injected()) return status;
  const Node& node = *reinterpret_cast<const Node*>(info);
  const auto found = node.find(name);
  if (found == node.end()) return status_of(ORT_FAIL, ("No attribute with name:'" + std::string(name) + "'is defined.").c_str());
  const T* held = std::get_if<T>(&found->second);
  if (held == nullptr) return status_of(ORT_FAIL, "Attribute name and type don't match");
  *value = *held;
  return nullptr;
}

inline OrtApi make_api() {
  OrtApi api{};  // functions that the library must not call are null pointers
  api.CreateStatus = [](OrtErrorCode code, const char* message) noexcept { return status_of(code, message); };
  api.GetErrorCode = [](const OrtStatus* status) noexcept { return reinterpret_cast<const Status*>(status)->code; };
  api.GetErrorMessage = [](const OrtStatus* status) noexcept {
    return reinterpret_cast<const Status*>(status)->message.c_str();
  };
  api.ReleaseStatus = [](OrtStatus* status) noexcept {
    live_statuses -= status != nullptr;
    delete reinterpret_cast<Status*>(status);
  };
  api.KernelInfoGetAttribute_int64 = [](const OrtKernelInfo* info, const char* name, int64_t* value) noexcept {
    return attribute(info, name, value);
  };
  api.KernelInfoGetAttribute_float = [](const OrtKernelInfo* info, const char* name, float* value) noexcept {
    return attribute(info, name, value);
  };
  api.KernelContext_GetInput = [](const OrtKernelContext* context, size_t index, const OrtValue** value) noexcept {
    if (OrtStatus* status = injected()) return status;
    const Tensor& tensor = reinterpret_cast<const Context*>(context)->inputs.at(index);
    *value = tensor.data == nullptr ? nullptr : reinterpret_cast<const OrtValue*>(&tensor);
    return static_cast<OrtStatus*>(nullptr);
  };
  api.GetTensorTypeAndShape = [](const OrtValue* value, OrtTensorTypeAndShapeInfo** info) noexcept {
    const Outside outside;
    if (OrtStatus* status = injected()) return status;
    ++live_infos;
    const Tensor& tensor = *reinterpret_cast<const Tensor*>(value);
    *info = reinterpret_cast<OrtTensorTypeAndShapeInfo*>(new Info{tensor.shape, {}, tensor.type});
    return static_cast<OrtStatus*>(nullptr);
  };
  api.ReleaseTensorTypeAndShapeInfo = [](OrtTensorTypeAndShapeInfo* info) noexcept {
    --live_infos;
    delete reinterpret_cast<Info*>(info);
  };
  api.GetDimensionsCount = [](const OrtTensorTypeAndShapeInfo* info, size_t* rank) noexcept {
    if (OrtStatus* status = injected()) return status;
    *rank = info_of(info).shape.size();
    return static_cast<OrtStatus*>(nullptr);
  };
  api.GetDimensions = [](const OrtTensorTypeAndShapeInfo* info, int64_t* extents, size_t count) noexcept {
    if (OrtStatus* status = injected()) return status;
    std::copy_n(info_of(info).shape.begin(), count, extents);
    return static_cast<OrtStatus*>(nullptr);
  };
  api.GetSymbolicDimensions = [](const OrtTensorTypeAndShapeInfo* info, const char** names, size_t count) noexcept {
    if (OrtStatus* status = injected()) return status;
    for (size_t i = 0; i < count; ++i) {
      const bool has_name = i < info_of(info).names.size();
      names[i] = has_name ? info_of(info).names[i].c_str() : nullptr;
    }
    return static_cast<OrtStatus*>(nullptr);
  };
  api.GetTensorMutableData = [](OrtValue* value, void** data) noexcept {
    if (OrtStatus* status = injected()) return status;
    *data = reinterpret_cast<Tensor*>(value)->data;
    return static_cast<OrtStatus*>(nullptr);
  };
  api.KernelContext_GetOutput = [](OrtKernelContext* opaque, size_t, const int64_t* extents, size_t rank,
                                   OrtValue** value) noexcept {
    const Outside outside;
    if (OrtStatus* status = injected()) return status;
    Context& context = *reinterpret_cast<Context*>(opaque);
    context.output.shape.assign(extents, extents + rank);
    if (nnorm::count(context.output.shape) >= context.refused_from) return status_of(ORT_FAIL, "out of memory");
    context.output_made = true;
    *value = reinterpret_cast<OrtValue*>(&context.output);
    return static_cast<OrtStatus*>(nullptr);
  };
  api.KernelContext_ParallelFor = [](const OrtKernelContext*, void (*item)(void*, size_t), size_t items, size_t,
                                     void* call) noexcept {
    if (OrtStatus* status = injected()) return status;
    {
      const Outside outside;
      handed_out.push_back(items);
    }
    for (size_t i = items; i-- > 0;) item(call, i);  // any order is allowed
    return static_cast<OrtStatus*>(nullptr);
  };
  api.KernelContext_GetGPUComputeStream = [](const OrtKernelContext*, void** stream) noexcept {
    if (OrtStatus* status = injected()) return status;
    *stream = gpu_stream;
    return static_cast<OrtStatus*>(nullptr);
  };
  api.CreateTensorTypeAndShapeInfo = [](OrtTensorTypeAndShapeInfo** info) noexcept {
    const Outside outside;
    if (OrtStatus* status = injected()) return status;
    ++live_infos;
    *info = reinterpret_cast<OrtTensorTypeAndShapeInfo*>(new Info{});
    return static_cast<OrtStatus*>(nullptr);
  };
  api.GetTensorElementType = [](const OrtTensorTypeAndShapeInfo* info, ONNXTensorElementDataType* type) noexcept {
    if (OrtStatus* status = injected()) return status;
    *type = info_of(info).type;
    return static_cast<OrtStatus*>(nullptr);
  };
  api.SetTensorElementType = [](OrtTensorTypeAndShapeInfo* info, ONNXTensorElementDataType type) noexcept {
    if (OrtStatus* status = injected()) return status;
    reinterpret_cast<Info*>(info)->type = type;
    return static_cast<OrtStatus*>(nullptr);
  };
  api.SetDimensions = [](OrtTensorTypeAndShapeInfo* info, const int64_t* extents, size_t rank) noexcept {
    const Outside outside;
    if (OrtStatus* status = injected()) return status;
    reinterpret_cast<Info*>(info)->shape.assign(extents, extents + rank);
    return static_cast<OrtStatus*>(nullptr);
  };
  api.SetSymbolicDimensions = [](OrtTensorTypeAndShapeInfo* info, const char** names, size_t rank) noexcept {
    const Outside outside;
    if (OrtStatus* status = injected()) return status;
    for (size_t i = 0; i < rank; ++i) reinterpret_cast<Info*>(info)->names.emplace_back(names[i] ? names[i] : "");
    return static_cast<OrtStatus*>(nullptr);
  };
  api.KernelInfoGetConstantInput_tensor = [](const OrtKernelInfo* info, size_t index, int* is_constant,
                                             const OrtValue** value) noexcept {
    if (OrtStatus* status = injected()) return status;
    const auto found = constants.find({info, index});
    *is_constant = found != constants.end();
    *value = *is_constant ? reinterpret_cast<const OrtValue*>(&found->second) : nullptr;
    return static_cast<OrtStatus*>(nullptr);
  };
  api.GetTensorMemoryInfo = [](const OrtValue* value, const OrtMemoryInfo** memory) noexcept {
    if (OrtStatus* status = injected()) return status;
    *memory = reinterpret_cast<const OrtMemoryInfo*>(value);
    return static_cast<OrtStatus*>(nullptr);
  };
  api.KernelContext_GetAllocator = [](const OrtKernelContext*, const OrtMemoryInfo*, OrtAllocator** allocator) noexcept {
    const Outside outside;
    if (OrtStatus* status = injected()) return status;
    ++live_allocators;
    *allocator = new Allocator;
    return static_cast<OrtStatus*>(nullptr);
  };
  api.ReleaseAllocator = [](OrtAllocator* allocator) noexcept {
    --live_allocators;
    delete static_cast<Allocator*>(allocator);
  };
  api.MemoryInfoGetDeviceType = [](const OrtMemoryInfo* memory, OrtMemoryInfoDeviceType* device) noexcept {
    const bool on_gpu = reinterpret_cast<const Tensor*>(memory)->on_gpu;
    *device = on_gpu ? OrtMemoryInfoDeviceType_GPU : OrtMemoryInfoDeviceType_CPU;
  };
  api.ShapeInferContext_GetInputTypeShape = [](const OrtShapeInferContext* context, size_t,
                                               OrtTensorTypeAndShapeInfo** info) noexcept {
    if (OrtStatus* status = injected()) return status;
    auto& inference = *const_cast<InferenceContext*>(reinterpret_cast<const InferenceContext*>(context));
    *info = reinterpret_cast<OrtTensorTypeAndShapeInfo*>(&inference.input);
    return static_cast<OrtStatus*>(nullptr);
  };
  api.ShapeInferContext_SetOutputTypeShape = [](const OrtShapeInferContext* context, size_t,
                                                const OrtTensorTypeAndShapeInfo* info) noexcept {
    const Outside outside;
    if (OrtStatus* status = injected()) return status;
    auto& inference = *const_cast<InferenceContext*>(reinterpret_cast<const InferenceContext*>(context));
    inference.published = true;
    inference.output = info_of(info);
    return static_cast<OrtStatus*>(nullptr);
  };
  api.CreateCustomOpDomain = [](const char*, OrtCustomOpDomain** domain) noexcept {
    const Outside outside;
    if (OrtStatus* status = injected()) return status;
    ++live_domains;
    *domain = reinterpret_cast<OrtCustomOpDomain*>(new Domain);
    return static_cast<OrtStatus*>(nullptr);
  };
  api.ReleaseCustomOpDomain = [](OrtCustomOpDomain* domain) noexcept {
    live_domains -= domain != nullptr;
    delete reinterpret_cast<Domain*>(domain);
  };
  api.CustomOpDomain_Add = [](OrtCustomOpDomain* domain, const OrtCustomOp* op) noexcept {
    const Outside outside;
    if (OrtStatus* status = injected()) return status;
    reinterpret_cast<Domain*>(domain)->operators.push_back(op);
    return static_cast<OrtStatus*>(nullptr);
  };
  api.AddCustomOpDomain = [](OrtSessionOptions* options, OrtCustomOpDomain* domain) noexcept {
    if (OrtStatus* status = injected()) return status;
    *reinterpret_cast<Domain**>(options) = reinterpret_cast<Domain*>(domain);
    return static_cast<OrtStatus*>(nullptr);
  };
  return api;
}

// The version and the API of the ONNX Runtime that the next registration sees; each API has its own domain.
inline const char* version = "1.31.0";
inline const OrtApi* current_api = nullptr;

inline const OrtApiBase base{[](uint32_t) noexcept { return current_api; }, []() noexcept { return version; }};

// Resets the failing call and allocation, and returns whether one failed.
inline bool stop_failing() {
  failing_call = 0;
  return nnorm_test::stop_failing();
}

}  // namespace nnorm_test::host
