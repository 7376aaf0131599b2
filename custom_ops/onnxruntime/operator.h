// From a C++ class to ONNX Runtime's table of callbacks. An operator is a class template of the tensors' type, with
//
//   static constexpr const char* name;        the node's
//   static constexpr size_t parameters;       inputs after X that have the arithmetic's type
//   static constexpr size_t operands;         inputs after those that have X's type and shape
//   explicit Operator(const Attributes&);
//   void operator()(const Run&) const;        throws Error
//
// Output Y has the shape of X, and may take the memory of X or of an operand.
#pragma once

#include <climits>
#include <cstdlib>
#include <memory>

#include "runtime.h"

namespace nnorm::ort {

template <class T>
constexpr ONNXTensorElementDataType onnx_type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
template <>
inline constexpr ONNXTensorElementDataType onnx_type<float> = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
template <>
inline constexpr ONNXTensorElementDataType onnx_type<double> = ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
template <>
inline constexpr ONNXTensorElementDataType onnx_type<Float16> = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
template <>
inline constexpr ONNXTensorElementDataType onnx_type<BFloat16> = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;

// An OrtCustomOp that knows which ONNX Runtime it belongs to: one process may have loaded several.
struct CustomOp : OrtCustomOp {
  const OrtApi* api;
};

// Publishes X's shape as Y's where every axis is a number or has a name. ONNX Runtime would take two nameless axes, and
// an unknown rank, for something that they are not, and share memory between tensors of different sizes.
OrtStatus* infer_shape(const OrtApi* api, OrtShapeInferContext* context) noexcept;

template <template <class> class Operator, class T>
struct Callbacks {
  using Op = Operator<T>;

  struct Kernel {
    const OrtApi* api;
    Op op;
  };

  static OrtStatus* ORT_API_CALL create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info,
                                        void** kernel) noexcept {
    return guarded(api, Op::name, [&] { *kernel = new Kernel{api, Op(Attributes(api, info))}; });
  }

  static OrtStatus* ORT_API_CALL compute(void* data, OrtKernelContext* context) noexcept {
    const Kernel& kernel = *static_cast<const Kernel*>(data);
    return guarded(kernel.api, Op::name, [&] { kernel.op(Run(kernel.api, context)); });
  }

  static ONNXTensorElementDataType ORT_API_CALL input_type(const OrtCustomOp*, size_t index) noexcept {
    return index == 0 || index > Op::parameters ? onnx_type<T> : onnx_type<Arithmetic<T>>;
  }

  static size_t ORT_API_CALL may_inplace(int** inputs, int** outputs) noexcept {
    constexpr size_t choices = 1 + Op::operands;
    *inputs = static_cast<int*>(std::calloc(choices, sizeof(int)));
    *outputs = static_cast<int*>(std::calloc(choices, sizeof(int)));  // output 0, each time
    if (*inputs == nullptr || *outputs == nullptr) return 0;
    for (size_t i = 0; i < Op::operands; ++i) (*inputs)[1 + i] = int(1 + Op::parameters + i);
    return choices;
  }

  static void ORT_API_CALL release_inplace(int* inputs, int* outputs) noexcept {
    std::free(inputs);
    std::free(outputs);
  }
};

// `version` is the API level that the runtime and the headers have in common: what ONNX Runtime reads of the table.
template <template <class> class Operator, class T>
std::unique_ptr<CustomOp> custom_op(const OrtApi* api, uint32_t version) {
  using C = Callbacks<Operator, T>;
  auto op = std::make_unique<CustomOp>();
  op->api = api;
  op->version = version;
  op->GetName = [](const OrtCustomOp*) noexcept { return Operator<T>::name; };
  op->GetExecutionProviderType = [](const OrtCustomOp*) noexcept { return execution_provider; };
  op->GetInputTypeCount = [](const OrtCustomOp*) noexcept { return 1 + Operator<T>::parameters + Operator<T>::operands; };
  op->GetInputType = C::input_type;
  op->GetInputCharacteristic = [](const OrtCustomOp*, size_t) noexcept { return INPUT_OUTPUT_REQUIRED; };
  op->GetInputMemoryType = [](const OrtCustomOp*, size_t) noexcept { return OrtMemTypeDefault; };
  op->GetOutputTypeCount = [](const OrtCustomOp*) noexcept -> size_t { return 1; };
  op->GetOutputType = [](const OrtCustomOp*, size_t) noexcept { return onnx_type<T>; };
  op->GetOutputCharacteristic = [](const OrtCustomOp*, size_t) noexcept { return INPUT_OUTPUT_REQUIRED; };
  op->GetStartVersion = [](const OrtCustomOp*) noexcept { return 1; };
  op->GetEndVersion = [](const OrtCustomOp*) noexcept { return INT_MAX; };
  op->CreateKernelV2 = C::create;
  op->KernelComputeV2 = C::compute;
  op->KernelDestroy = [](void* kernel) noexcept { delete static_cast<typename C::Kernel*>(kernel); };
  op->GetMayInplace = C::may_inplace;
  op->ReleaseMayInplace = C::release_inplace;
  op->InferOutputShapeFn = [](const OrtCustomOp* self, OrtShapeInferContext* context) noexcept {
    return infer_shape(static_cast<const CustomOp*>(self)->api, context);
  };
  return op;
}

// The operators of one ONNX Runtime. They must outlive every session, so whoever makes them never destroys them.
class Operators {
 public:
  Operators(const OrtApi* api, uint32_t version) : api_(api), version_(version) {}

  template <template <class> class Operator, class T>
  void add() {
    ops_.push_back(custom_op<Operator, T>(api_, version_));
  }

  // BatchNormalNorm, its epilogues, LayerNormalNorm and GroupNormalNorm, of every type (operators.cpp).
  void add_all();

  void add_to(OrtCustomOpDomain* domain) const {
    for (const auto& op : ops_) check(api_, api_->CustomOpDomain_Add(domain, op.get()));
  }

 private:
  const OrtApi* api_;
  uint32_t version_;
  std::vector<std::unique_ptr<CustomOp>> ops_;
};

}  // namespace nnorm::ort
