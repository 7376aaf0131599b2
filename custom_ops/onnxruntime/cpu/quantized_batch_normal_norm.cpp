#include "quantized_batch_normal_norm.h"

#include <cstring>
#include <memory>
#include <mutex>

#include "solve.h"

namespace nnorm::ort {

template <>
inline constexpr ONNXTensorElementDataType onnx_type<uint8_t> = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
template <>
inline constexpr ONNXTensorElementDataType onnx_type<int8_t> = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;

namespace {

// The inputs, in the order of nnorm_export/domain/quantized_batch_normal_norm.py.
enum Input { x, x_scale, x_zero_point, y_scale, y_zero_point, first_parameter, residual = first_parameter + 6, residual_scale };
constexpr const char* input_names[] = {"X",     "x_scale",      "x_zero_point", "y_scale", "y_zero_point",
                                       "scale", "shift",        "exponent_pos", "exponent_neg", "weight",
                                       "bias",  "residual",     "residual_scale", "residual_zero_point"};

constexpr bool is_tensor(size_t input) { return input == x || input == residual; }
constexpr bool is_parameter(size_t input) { return input >= first_parameter && input < residual; }
constexpr bool is_zero_point(size_t input) {
  return input == x_zero_point || input == y_zero_point || input == residual_scale + 1;
}

// X and its zero point are TX, Y's zero point is TY, and the residual and its zero point are TR.
template <class TX, class TY, class TR, bool takes_residual>
struct QuantizedSignature {
  static constexpr size_t inputs = takes_residual ? 14 : 11;
  static constexpr ONNXTensorElementDataType y_type = onnx_type<TY>;
  static constexpr size_t y_typed_as = y_zero_point;

  static constexpr bool is_tensor(size_t input) { return ort::is_tensor(input); }
  static constexpr ONNXTensorElementDataType type(size_t input) {
    if (input == x || input == x_zero_point) return onnx_type<TX>;
    if (input == y_zero_point) return onnx_type<TY>;
    return input == residual || is_zero_point(input) ? onnx_type<TR> : onnx_type<float>;
  }
};

// What the code of a node needs to know of its operator. One code serves all operators and types.
struct Facts {
  Epilogue epilogue;
  Activation activation;
  Roles roles;
  bool x_is_signed, y_is_signed, residual_is_signed;
};

Quantization quantization(const std::vector<Tensor>& inputs, size_t scale, bool is_signed) {
  const Tensor& zero_point = inputs[scale + 1];
  const int32_t value = is_signed ? int32_t(*zero_point.as<int8_t>()) : int32_t(*zero_point.as<uint8_t>());
  return {*inputs[scale].as<float>(), value, is_signed};
}

// Why the shapes of the inputs other than X and the residual are refused; empty if they are valid.
std::string shape_refusal(const Facts& facts, const std::vector<Tensor>& inputs) {
  const Shape& channels = inputs[first_parameter].shape;
  for (size_t i = 0; i < facts.roles.inputs; ++i) {
    if (is_tensor(i)) continue;
    const Shape& shape = inputs[i].shape;
    if (!is_parameter(i) && !shape.empty())
      return std::string(input_names[i]) + " must be a scalar, it is " + to_string(shape);
    if (is_parameter(i) && (shape.size() != 1 || shape != channels))
      return std::string(input_names[i]) + " must have one number for each channel, as " + input_names[first_parameter] +
             " " + to_string(channels) + "; it is " + to_string(shape);
  }
  return "";
}

// The table for these inputs. X and the residual are not read.
QuantizedTable table_for(const Facts& facts, const std::vector<Tensor>& inputs) {
  refuse(shape_refusal(facts, inputs));
  QuantizedNorm norm{};
  norm.x = quantization(inputs, x_scale, facts.x_is_signed);
  norm.y = quantization(inputs, y_scale, facts.y_is_signed);
  if (facts.roles.inputs > residual) norm.residual = quantization(inputs, residual_scale, facts.residual_is_signed);
  for (size_t i = 0; i < 6; ++i) norm.parameters[i] = inputs[first_parameter + i].as<float>();
  norm.channels = count(inputs[first_parameter].shape);
  norm.epilogue = facts.epilogue;
  norm.activation = facts.activation;
  refuse(scale_refusal(norm));
  QuantizedTable table;
  const size_t channel = make_table(norm, table);
  if (channel < norm.channels)
    refuse("the parameters of channel " + std::to_string(channel) + " make NaN of an element; they must be finite");
  return table;
}

// A table, with the bytes of the inputs that it was made from as its key.
struct KeyedTable {
  std::vector<uint8_t> key;
  QuantizedTable table;
};

std::vector<uint8_t> key_of(const Facts& facts, const std::vector<Tensor>& inputs) {
  std::vector<uint8_t> key;
  for (size_t i = 0; i < facts.roles.inputs; ++i) {
    if (is_tensor(i)) continue;
    const auto* bytes = inputs[i].as<uint8_t>();
    key.insert(key.end(), bytes, bytes + count(inputs[i].shape) * (is_zero_point(i) ? 1 : sizeof(float)));
  }
  return key;
}

class QuantizedNode {
 public:
  QuantizedNode(const Attributes& attributes, const Facts& facts)
      : facts_(facts), constants_(attributes, facts.roles) {
    attributes.read("axis", axis_);
    if (axis_ != 1 && axis_ != -1) refuse("attribute axis must be 1 or -1, it is " + std::to_string(axis_));
    // Invalid constants are refused here, when a file is opened; also those of an outer graph that are not the run's
    // inputs.
    if (constants_.are_known())
      of_constants_ = std::make_shared<const KeyedTable>(KeyedTable{{}, table_for(facts, constants_.tensors())});
  }

  void operator()(const Run& run) const {
    const std::shared_ptr<const KeyedTable> made = constants_.are_inputs_of(run) ? of_constants_ : table_of(run);
    const QuantizedTable& table = made->table;
    const Tensor of_x = run.input(x), of_residual = facts_.roles.inputs > residual ? run.input(residual) : Tensor{};
    const Shape& shape = of_x.shape;
    refuse(tensor_refusal(of_x, of_residual, table.channels));
    QuantizedWork work{};
    work.y = static_cast<uint8_t*>(run.output(shape));
    work.x = of_x.as<uint8_t>();
    work.residual = of_residual.as<uint8_t>();
    work.bytes = table.bytes.data();
    work.steps = table.steps.data();
    work.sum = table.sum;
    work.channels = table.channels;
    work.extent = axis_ == 1 ? count(shape, 2) : 1;
    work.samples = axis_ == 1 ? size_t(shape[0]) : work.channels ? count(shape) / work.channels : 0;
    const QuantizedKernels& kernels = best_instruction_set().quantized;
    constexpr size_t fewest_to_share = 2;  // the tables of an item are read from main memory, which pays for a second thread
    run_items(run, work, work.residual != nullptr ? kernels.sum : kernels.table, fewest_to_share);
  }

 private:
  // Why the shapes of X and the residual are refused; empty if they are valid.
  std::string tensor_refusal(const Tensor& of_x, const Tensor& of_residual, size_t channels) const {
    const Shape& shape = of_x.shape;
    if (shape.size() < 2)
      return std::string("X must be ") + (axis_ == 1 ? "[N, C, *spatial]" : "[N, *spatial, C]") + ", it is " + to_string(shape);
    if (std::string reason = size_refusal(shape); !reason.empty()) return reason;
    if (const int64_t extent = axis_ == 1 ? shape[1] : shape.back(); extent != int64_t(channels))
      return std::string(input_names[first_parameter]) + " must be [" + std::to_string(extent) +
             "], one number for each channel of X " + to_string(shape) + ", whose axis is " + std::to_string(axis_) + "; it is [" +
             std::to_string(channels) + "]";
    if (facts_.roles.inputs > residual && of_residual.shape != shape)
      return "residual must have the shape of X, " + to_string(shape) + "; it is " + to_string(of_residual.shape);
    return "";
  }

  // The table for inputs that the model computes. It is made again if they have changed.
  std::shared_ptr<const KeyedTable> table_of(const Run& run) const {
    const std::vector<Tensor> inputs = run.parameters(facts_.roles);
    refuse(shape_refusal(facts_, inputs));
    std::vector<uint8_t> key = key_of(facts_, inputs);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (last_ && last_->key == key) return last_;
    }
    auto made = std::make_shared<const KeyedTable>(KeyedTable{std::move(key), table_for(facts_, inputs)});
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_ = made;
  }

  const Facts facts_;
  const Constants constants_;
  int32_t axis_ = 1;
  std::shared_ptr<const KeyedTable> of_constants_;
  mutable std::mutex mutex_;  // a session may run in several threads
  mutable std::shared_ptr<const KeyedTable> last_;
};

constexpr const char* activation_names[] = {
    "",
#define NNORM_NAME(activation, name, value) #name,
    NNORM_FOR_EACH_ACTIVATION(NNORM_NAME)
#undef NNORM_NAME
};

template <Epilogue epilogue, Activation activation, class TX, class TY, class TR>
class QuantizedKernel : public QuantizedNode {
 public:
  using Signature = QuantizedSignature<TX, TY, TR, takes_residual<epilogue>>;
  static const char* name() {
    static const std::string& text =
        *new std::string(std::string("Quantized") + epilogues[size_t(epilogue)].operator_name +
                         activation_names[size_t(activation)]);  // sessions may outlive statics
    return text.c_str();
  }

  explicit QuantizedKernel(const Attributes& attributes)
      : QuantizedNode(attributes, {epilogue, activation, roles_of<Signature>, is_signed<TX>, is_signed<TY>, is_signed<TR>}) {}

 private:
  template <class T>
  static constexpr bool is_signed = T(-1) < T(0);
};

template <Epilogue epilogue, Activation activation, class TX, class TY>
void add_typed(Operators& operators) {
  operators.add<QuantizedKernel<epilogue, activation, TX, TY, uint8_t>>();
  if constexpr (takes_residual<epilogue>) operators.add<QuantizedKernel<epilogue, activation, TX, TY, int8_t>>();
}

template <Epilogue epilogue, Activation activation>
void add(Operators& operators) {
  add_typed<epilogue, activation, uint8_t, uint8_t>(operators);
  add_typed<epilogue, activation, uint8_t, int8_t>(operators);
  add_typed<epilogue, activation, int8_t, uint8_t>(operators);
  add_typed<epilogue, activation, int8_t, int8_t>(operators);
}

}  // namespace

void add_quantized_operators(Operators& operators) {
#define NNORM_ADD(epilogue, ...) add<Epilogue::epilogue, Activation::none>(operators);
  NNORM_FOR_EACH_EPILOGUE(NNORM_ADD)
#undef NNORM_ADD
#define NNORM_ADD(activation, ...) add<Epilogue::none, Activation::activation>(operators);
  NNORM_FOR_EACH_ACTIVATION(NNORM_ADD)
#undef NNORM_ADD
}

}  // namespace nnorm::ort
