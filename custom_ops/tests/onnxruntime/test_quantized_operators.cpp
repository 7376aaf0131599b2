// The operators between quantized tensors, called as ONNX Runtime does: signatures, refusals, constant inputs and computed
// ones, and every call of the API and every allocation failing in turn.
#include <cmath>
#include <cstring>

#include "registered.h"

namespace nnorm_test {
namespace {

constexpr auto u8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, s8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
using nnorm::Shape;

constexpr int64_t channels = 5;

// A node and its inputs: a norm whose ψ is the identity, so that Y = X·0.1/0.2, rounded.
struct Case {
  host::Node node{{"axis", int64_t(-1)}};
  Shape shape{3, channels};
  std::vector<uint8_t> x = std::vector<uint8_t>(15), residual = std::vector<uint8_t>(15), y = std::vector<uint8_t>(15);
  std::vector<float> ones = std::vector<float>(channels, 1.0f), zeros = std::vector<float>(channels, 0.0f);
  float x_scale = 0.1f, y_scale = 0.2f, residual_scale = 0.2f;
  uint8_t zero_point = 0;
  std::vector<host::Tensor> inputs;

  explicit Case(size_t count) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = uint8_t(3 * i), residual[i] = uint8_t(i % 3);
    inputs = {{shape, x.data()}, {{}, &x_scale}, {{}, &zero_point}, {{}, &y_scale}, {{}, &zero_point}};
    for (int i = 0; i < 6; ++i) inputs.push_back({{channels}, (i == 1 || i == 5 ? zeros : ones).data()});
    if (count > 11) {
      inputs.push_back({shape, residual.data()});
      inputs.push_back({{}, &residual_scale});
      inputs.push_back({{}, &zero_point});
    }
  }

  const OrtKernelInfo* info() const { return reinterpret_cast<const OrtKernelInfo*>(&node); }
  void declare_constants(const OrtCustomOp* op) const { declare_constants(op, inputs); }
  void declare_constants(const OrtCustomOp* op, const std::vector<host::Tensor>& constants) const {
    for (size_t i = 1; i < inputs.size(); ++i) {
      if (i == 11) continue;
      host::Tensor& constant = host::constants[{info(), i}] = constants[i];
      if (constant.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED) constant.type = op->GetInputType(op, i);
    }
  }
  ~Case() { host::constants.clear(); }
};

// The message of the error; empty if Y was computed.
std::string run(const OrtCustomOp* op, Case& c) {
  void* state = nullptr;
  host::Context context{c.inputs, {{}, c.y.data()}, size_t(-1)};
  OrtStatus* status;
  {
    const Inside inside;
    status = op->CreateKernelV2(op, host::current_api, c.info(), &state);
    if (status == nullptr) status = op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));
    if (status == nullptr) status = op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));  // as before
    if (state != nullptr) op->KernelDestroy(state);
  }
  if (status == nullptr) return "";
  const std::string message = host::current_api->GetErrorMessage(status);
  host::current_api->ReleaseStatus(status);
  return message.empty() ? "no message" : message;
}

// The activation in the operator's name, if there is one, applied to a number that is not negative.
double activated(const std::string& name, double y) {
  if (name.find("HardSwish") != std::string::npos) return y * std::fmin(y / 6 + 0.5, 1);
  return name.find("Swish") != std::string::npos ? y / (1 + std::exp(-y)) : y;
}

void check_result(const OrtCustomOp* op, const Case& c, bool is_signed, const char* what) {
  for (size_t i = 0; i < c.x.size(); ++i) {
    const double sum = c.x[i] * 0.1 + (c.inputs.size() > 11 ? c.residual[i] * 0.2 : 0);
    const int expected = int(std::nearbyint(double(float(activated(op->GetName(op), sum))) / 0.2));
    CHECK(std::abs(int(c.y[i]) - expected) <= (std::fmod(sum / 0.1, 2) > 0.9 ? 1 : 0), "%s, %s, %d: Y[%zu] is %d, not %d",
          op->GetName(op), what, is_signed, i, c.y[i], expected);
  }
}

void check_signature(const OrtCustomOp* op, size_t count) {
  CHECK(op->GetInputTypeCount(op) == count && op->GetOutputTypeCount(op) == 1, "%s: %zu inputs", op->GetName(op), count);
  CHECK(std::string(op->GetExecutionProviderType(op)) == "CPUExecutionProvider", "%s", op->GetName(op));
  for (size_t i = 0; i < count; ++i) {
    const ONNXTensorElementDataType type = op->GetInputType(op, i);
    const bool is_integer = i == 0 || i == 2 || i == 4 || i == 11 || i == 13;
    CHECK(is_integer ? type == u8 || type == s8 : type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "input %zu", i);
  }
  CHECK(op->GetInputType(op, 0) == op->GetInputType(op, 2) && op->GetOutputType(op, 0) == op->GetInputType(op, 4), "types");
  int *inputs = nullptr, *outputs = nullptr;
  const size_t choices = op->GetMayInplace(&inputs, &outputs);
  for (size_t i = 0; i < choices; ++i)
    CHECK(op->GetInputType(op, size_t(inputs[i])) == op->GetOutputType(op, 0) && outputs[i] == 0 && inputs[i] % 11 == 0,
          "%s: in place %d", op->GetName(op), inputs[i]);
  if (choices > 0) op->ReleaseMayInplace(inputs, outputs);  // as ONNX Runtime does
  else CHECK(inputs == nullptr && outputs == nullptr, "%s: ONNX Runtime does not release lists without entries", op->GetName(op));
}

void check_inference(const OrtCustomOp* op) {
  for (long* const failing : {&host::failing_call, &failing_allocation})
    for (long n = 0; n < 16; ++n) {
      host::InferenceContext context{{{-1, 3}, {"batch", ""}, s8}};
      *failing = n;
      OrtStatus* status;
      {
        const Inside inside;
        status = op->InferOutputShapeFn(op, reinterpret_cast<OrtShapeInferContext*>(&context));
      }
      CHECK(host::stop_failing() == (status != nullptr), "%s: shape inference, failure %ld", op->GetName(op), n);
      if (status != nullptr) host::current_api->ReleaseStatus(status);
      else CHECK(context.output.type == s8 && context.output.shape == (Shape{-1, 3}) && context.output.names[0] == "batch", "shape");
    }
}

void check_refusals(const OrtCustomOp* op, size_t count) {
  const auto refused = [&](const char* reason, auto change) {
    for (const bool constant : {false, true}) {
      Case c(count);
      change(c);
      if (constant) c.declare_constants(op);
      const std::string message = run(op, c);
      CHECK(message.find(reason) != std::string::npos, "%s: %s in place of %s", op->GetName(op), message.c_str(), reason);
    }
  };
  refused("axis must be 1 or -1, it is 2", [](Case& c) { c.node["axis"] = int64_t(2); });
  refused("axis cannot be read", [](Case& c) { c.node["axis"] = 1.0f; });
  refused("x_scale must be greater than 0", [](Case& c) { c.x_scale = -1; });
  refused("y_scale must be greater than 0", [](Case& c) { c.y_scale = NAN; });
  refused("y_scale must be a scalar", [](Case& c) { c.inputs[3].shape = {channels}; });
  refused("x_zero_point must be a scalar", [](Case& c) { c.inputs[2].shape = {1}; });
  refused("shift must have one number for each channel", [](Case& c) { c.inputs[6].shape = {channels - 1}; });
  refused("scale must have one number for each channel", [](Case& c) {
    for (size_t i = 5; i < 11; ++i) c.inputs[i].shape = {1, channels};
  });
  refused("scale must be [5], one number for each channel of X [3, 5], whose axis is -1", [](Case& c) {
    for (size_t i = 5; i < 11; ++i) c.inputs[i].shape = {3};
  });
  refused("X must be [N, *spatial, C]", [](Case& c) { c.inputs[0].shape = {channels}; });
  refused("negative extent", [](Case& c) { c.inputs[0].shape = {-1, channels}; });
  refused("make NaN", [](Case& c) { c.zeros[2] = NAN; });
  if (count > 11) {
    refused("residual_scale must be greater than 0", [](Case& c) { c.residual_scale = 0; });
    refused("residual must have the shape of X", [](Case& c) { c.inputs[11].shape = {1, channels}; });
  }
}

// ONNX Runtime may give a kernel constants of outer graphs that are not the run's parameters.
void check_constants_of_outer_graphs(const OrtCustomOp* op, size_t count, bool is_signed) {
  const auto unused = [&](const char* what, auto change) {
    Case c(count), outer(count);
    change(outer);
    c.declare_constants(op, outer.inputs);
    const std::string message = run(op, c);
    CHECK(message.empty(), "%s, %s: %s", op->GetName(op), what, message.c_str());
    check_result(op, c, is_signed, what);
  };
  void* const nowhere = reinterpret_cast<void*>(1);
  unused("another scale", [](Case& outer) { outer.x_scale = 0.4f; });
  unused("another type", [&](Case& outer) { outer.inputs[6].type = s8, outer.inputs[6].data = nowhere; });
  unused("on a GPU", [&](Case& outer) {
    for (host::Tensor& constant : outer.inputs) constant.data = nowhere, constant.on_gpu = true;
  });
}

void check_operator(const OrtCustomOp* op) {
  const bool takes_residual = std::strstr(op->GetName(op), "Add") != nullptr;
  const size_t count = takes_residual ? 14 : 11;
  check_signature(op, count);
  check_inference(op);
  const bool is_signed = op->GetInputType(op, 0) == s8;
  for (const bool constant : {false, true}) {
    Case c(count);
    if (constant) c.declare_constants(op);
    const std::string message = run(op, c);
    CHECK(message.empty(), "%s: %s", op->GetName(op), message.c_str());
    check_result(op, c, is_signed, constant ? "constants" : "computed");
    c.x_scale = 0.2f, c.y_scale = 0.4f;  // another table, the same result
    check_result(op, c, is_signed, "as before");
    Case empty(count);
    empty.inputs[0].shape = {0, channels};
    if (takes_residual) empty.inputs[11].shape = {0, channels};
    CHECK(run(op, empty).empty(), "%s: an empty tensor", op->GetName(op));
    fail_in_turn(op->GetName(op), [&] {
      Case each(count);
      if (constant) each.declare_constants(op);
      return run(op, each);
    });
  }
  check_constants_of_outer_graphs(op, count, is_signed);
  check_refusals(op, count);
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  return with_operators([](const host::Domain& domain) {
    int found = 0;
    for (const OrtCustomOp* op : domain.operators)
      if (is_quantized(op)) {
        check_operator(op);
        ++found;
      }
    CHECK(found == 4 + 4 + 8 + 4 + 4, "%d operators", found);
  });
}
