// Makes ONNX Runtime's table of callbacks for a kernel class. The class has
//
//   using Signature;                          the types of its inputs and of the output, see FloatSignature
//   static const char* name();                of the ONNX node
//   explicit Kernel(const Attributes&);       throws Error
//   void operator()(const Run&) const;        throws Error
//
// The output Y has the shape of X, and may use the memory of X or of an operand of Y's type.
#pragma once

#include <memory>
#include <new>

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

// The inputs: X, parameters of type Arithmetic<T>, and operands of X's type and shape. Y has X's type and shape too.
template <class T, size_t parameters, size_t operands>
struct FloatSignature {
  using Real = Arithmetic<T>;
  static constexpr size_t parameter_count = parameters, inputs = 1 + parameters + operands;
  static constexpr ONNXTensorElementDataType y_type = onnx_type<T>;
  static constexpr size_t y_typed_as = 0;  // an input of Y's type

  static constexpr bool is_tensor(size_t input) { return input == 0 || input > parameters; }  // of X's shape
  static constexpr ONNXTensorElementDataType type(size_t input) {
    return is_tensor(input) ? onnx_type<T> : onnx_type<Real>;
  }
};

template <class Signature>
constexpr Roles roles_of{Signature::inputs, Signature::is_tensor, Signature::type};

// The parameters of a kernel with a FloatSignature, if they are constants, and what a provider prepares from them.
template <class Signature>
struct Parameters {
  const Constants constants;
  mutable MadeOnce prepared;

  explicit Parameters(const Attributes& attributes) : constants(attributes, roles_of<Signature>) {}
};

// The inputs of a FloatSignature in one run.
template <class Signature>
class Inputs {
 public:
  Inputs(const Run& run, const Parameters<Signature>& kept)
      : x_(run.input(0)),
        prepared_(kept.constants.are_inputs_of(run) ? &kept.prepared : nullptr),
        computed_(prepared_ ? std::vector<Tensor>() : run.parameters(roles_of<Signature>)),
        parameters_(prepared_ ? kept.constants.tensors() : computed_),
        operand_(has_operand ? run.input(last) : Tensor{}) {}
  Inputs(const Inputs&) = delete;

  const Tensor& operator[](size_t i) const { return i == 0 ? x_ : has_operand && i == last ? operand_ : parameters_[i]; }

  // Holds what is prepared from the parameters once; nullptr if the model computes the parameters.
  MadeOnce* prepared() const { return prepared_; }

 private:
  static constexpr size_t last = Signature::inputs - 1;
  static constexpr bool has_operand = last > Signature::parameter_count;
  static_assert(last <= Signature::parameter_count + 1);

  const Tensor x_;
  MadeOnce* const prepared_;
  const std::vector<Tensor> computed_;
  const std::vector<Tensor>& parameters_;
  const Tensor operand_;
};

// An OrtCustomOp, the ONNX Runtime that it belongs to (a process may have loaded several), and its execution provider.
struct CustomOp : OrtCustomOp {
  const OrtApi* api;
  const char* provider;
};

// Gives Y the shape of X and the type of input `y_typed_as`, if every axis is a number or has a name. Otherwise ONNX
// Runtime would take axes without names as equal and an unknown rank as a scalar, and share memory between tensors of
// different sizes.
OrtStatus* infer_shape(const OrtApi* api, OrtShapeInferContext* context, size_t y_typed_as) noexcept;

template <class Kernel>
struct Callbacks {
  using Signature = typename Kernel::Signature;

  struct State {
    const OrtApi* api;
    Kernel kernel;
  };

  static OrtStatus* ORT_API_CALL create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info,
                                        void** state) noexcept {
    return guarded(api, Kernel::name(), [&] { *state = new State{api, Kernel(Attributes(api, info))}; });
  }

  static OrtStatus* ORT_API_CALL compute(void* data, OrtKernelContext* context) noexcept {
    const State& state = *static_cast<const State*>(data);
    return guarded(state.api, Kernel::name(), [&] { state.kernel(Run(state.api, context)); });
  }

  static ONNXTensorElementDataType ORT_API_CALL input_type(const OrtCustomOp*, size_t index) noexcept {
    return Signature::type(index);
  }

  static size_t ORT_API_CALL may_inplace(int** inputs, int** outputs) noexcept {
    size_t choices = 0;
    for (size_t i = 0; i < Signature::inputs; ++i) choices += may_be_y(i);
    *inputs = *outputs = nullptr;
    if (choices == 0) return 0;  // ONNX Runtime then releases nothing
    *inputs = new (std::nothrow) int[choices]();
    *outputs = new (std::nothrow) int[choices]();  // output 0 for each
    if (*inputs == nullptr || *outputs == nullptr) {
      release_inplace(*inputs, *outputs);
      *inputs = *outputs = nullptr;
      return 0;
    }
    int* next = *inputs;
    for (size_t i = 0; i < Signature::inputs; ++i)
      if (may_be_y(i)) *next++ = int(i);
    return choices;
  }

  static constexpr bool may_be_y(size_t input) {
    return Signature::is_tensor(input) && Signature::type(input) == Signature::y_type;
  }

  static void ORT_API_CALL release_inplace(int* inputs, int* outputs) noexcept {
    delete[] inputs;
    delete[] outputs;
  }
};

// `version` is the lower API level of the runtime and the headers. ONNX Runtime reads the table up to this level.
template <class Kernel>
std::unique_ptr<CustomOp> custom_op(const OrtApi* api, uint32_t version, const char* provider) {
  using C = Callbacks<Kernel>;
  auto op = std::make_unique<CustomOp>();
  op->api = api;
  op->provider = provider;
  op->version = version;
  op->GetName = [](const OrtCustomOp*) noexcept { return Kernel::name(); };
  op->GetExecutionProviderType = [](const OrtCustomOp* self) noexcept {
    return static_cast<const CustomOp*>(self)->provider;
  };
  op->GetInputTypeCount = [](const OrtCustomOp*) noexcept { return Kernel::Signature::inputs; };
  op->GetInputType = C::input_type;
  op->GetInputCharacteristic = [](const OrtCustomOp*, size_t) noexcept { return INPUT_OUTPUT_REQUIRED; };
  op->GetInputMemoryType = [](const OrtCustomOp*, size_t) noexcept { return OrtMemTypeDefault; };
  op->GetOutputTypeCount = [](const OrtCustomOp*) noexcept -> size_t { return 1; };
  op->GetOutputType = [](const OrtCustomOp*, size_t) noexcept { return Kernel::Signature::y_type; };
  op->GetOutputCharacteristic = [](const OrtCustomOp*, size_t) noexcept { return INPUT_OUTPUT_REQUIRED; };
  op->GetStartVersion = [](const OrtCustomOp*) noexcept { return domain_version; };
  op->GetEndVersion = [](const OrtCustomOp*) noexcept { return domain_version; };
  op->CreateKernelV2 = C::create;
  op->KernelComputeV2 = C::compute;
  op->KernelDestroy = [](void* state) noexcept { delete static_cast<typename C::State*>(state); };
  op->GetMayInplace = C::may_inplace;
  op->ReleaseMayInplace = C::release_inplace;
  op->InferOutputShapeFn = [](const OrtCustomOp* self, OrtShapeInferContext* context) noexcept {
    return infer_shape(static_cast<const CustomOp*>(self)->api, context, Kernel::Signature::y_typed_as);
  };
  return op;
}

// The operators of one ONNX Runtime's execution provider. They must outlive every session, so their owner never destroys them.
class Operators {
 public:
  Operators(const OrtApi* api, uint32_t version, const char* provider) : api_(api), version_(version), provider_(provider) {}

  template <class Kernel>
  void add() {
    Kernel::name();  // the first call may allocate and throw, which ONNX Runtime's callback must not
    ops_.push_back(custom_op<Kernel>(api_, version_, provider_));
  }

  // Adds the operators of nnorm/operators.h for every type (operators.cpp).
  void add_all();

  void add_to(OrtCustomOpDomain* domain) const {
    for (const auto& op : ops_) check(api_, api_->CustomOpDomain_Add(domain, op.get()));
  }

 private:
  const OrtApi* api_;
  uint32_t version_;
  const char* provider_;
  std::vector<std::unique_ptr<CustomOp>> ops_;
};

}  // namespace nnorm::ort
