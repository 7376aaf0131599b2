// Random nodes of the operators between quantized tensors: fuzz_quantized_operators [CASES [SEED]].
//
// A case is an operator with its types, a shape of rank 0 to 5, an axis, scales, zero points and parameters, which are
// constants or computed, and some of them extreme. The library must refuse invalid nodes. Each element of the others is
// compared with the formula in float64: it must be less than half a step away. In some cases a call of the API or an
// allocation fails: the library must return an error, leak nothing, and give the right values in the next run.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "../oracle.h"
#include "nnorm/quantized.h"
#include "registered.h"

namespace nnorm_test {
namespace {

using nnorm::Shape;

constexpr size_t first_parameter = 5, residual_input = 11;

struct Figures {
  long cases = 0, refused = 0, made_to_fail = 0, elements = 0;
} figures;

bool is_signed(ONNXTensorElementDataType type) { return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8; }

struct Case {
  const OrtCustomOp* op;
  Random& random;
  std::string name;
  bool takes_residual, fits = true, may_make_nan = false, is_huge = false;
  int64_t axis;
  host::Node node;
  Shape shape, residual_shape, parameter_shapes[6];
  std::vector<uint8_t> x, residual;
  std::vector<float> parameters[6];
  float scales[3];         // of X, Y and the residual
  uint8_t zero_points[3];  // their bytes
  bool constant;

  Case(const OrtCustomOp* of, Random& numbers)
      : op(of), random(numbers), name(of->GetName(of)), takes_residual(of->GetInputTypeCount(of) > residual_input) {
    choose_shapes();
    choose_numbers();
    constant = random.below(2) != 0;
  }
  ~Case() { host::constants.clear(); }

  void choose_shapes() {
    const int64_t extents[] = {1, 2, 3, 4, 5, 7, 16, 33, 64, 65};
    shape.resize(random.below(12) ? 2 + random.below(4) : random.below(2));
    int64_t budget = 3000;
    for (int64_t& extent : shape) {
      extent = random.below(25) ? extents[random.below(10)] : 0;
      if (extent > budget) extent = 1;
      budget /= std::max<int64_t>(extent, 1);
    }
    axis = random.below(2) ? 1 : -1;
    if (random.below(25) == 0) axis = int64_t(random.below(9)) - 4;
    fits = shape.size() >= 2 && (axis == 1 || axis == -1);
    node["axis"] = axis;
    if (random.below(40) == 0) node["axis"] = std::string("text"), fits = false;
    if (axis == 1 && random.below(8) == 0) node.erase("axis");  // its default; with another type it was refused
    if (node.empty()) fits = shape.size() >= 2;
    const int64_t channels = shape.size() < 2 ? 3 : axis == -1 ? shape.back() : shape[1];
    for (Shape& each : parameter_shapes) each = {channels};
    residual_shape = shape;
    if (random.below(20) == 0) {  // one of another shape
      Shape& wrong = takes_residual && random.below(2) ? residual_shape : parameter_shapes[random.below(6)];
      wrong.push_back(1);
      fits = false;
    }
    if (fits && random.below(30) == 0) {  // more memory than any machine has
      shape[0] = int64_t(1) << (30 + random.below(33));
      residual_shape = shape;
      is_huge = nnorm::count(parameter_shapes[0]) > 0;
      for (size_t i = 1; i < shape.size(); ++i) is_huge = is_huge && shape[i] > 0;
      if (!is_huge) shape[0] = 1, residual_shape = shape;
    }
  }

  float number() {
    if (random.below(400) == 0) {
      const float odd[] = {NAN, INFINITY, -INFINITY, 1e-45f, 3e38f, -3e38f, 1e20f, 0.0f, -0.0f};
      return odd[random.below(9)];
    }
    return float(2 * random.normal());
  }

  void choose_numbers() {
    for (float& scale : scales) {
      scale = float(random.log_uniform(1e-3, 0.5));
      if (random.below(40) == 0) {
        const float odd[] = {0.0f, -0.1f, NAN, INFINITY, -INFINITY, 1e-45f, 1e-20f, 3e38f};
        scale = odd[random.below(8)];
      }
      const bool counts = &scale != &scales[2] || takes_residual;
      fits = fits && (!counts || (scale > 0 && std::isfinite(scale)));
    }
    may_make_nan = !std::isfinite(scales[0] * 255);
    for (uint8_t& zero : zero_points) zero = uint8_t(random.below(256));
    for (size_t i = 0; i < 6; ++i) {
      parameters[i].resize(nnorm::count(parameter_shapes[i]));
      for (float& value : parameters[i]) {
        const double exponent = random.below(6) ? random.uniform(-2, 4) : double(random.below(3));
        value = (i == 2 || i == 3) && random.below(300) ? float(exponent) : number();
        may_make_nan = may_make_nan || !std::isfinite(value);
      }
    }
    if (is_huge) return;
    x.resize(nnorm::count(shape));
    residual.resize(takes_residual ? x.size() : 0);
    for (std::vector<uint8_t>* bytes : {&x, &residual})
      for (uint8_t& byte : *bytes) byte = uint8_t(random.below(256));
  }

  int32_t element(size_t input, uint8_t byte) const {
    return is_signed(op->GetInputType(op, input)) ? int32_t(int8_t(byte)) : int32_t(byte);
  }

  std::string describe() const { return name + " " + nnorm::to_string(shape) + ", axis " + std::to_string(axis); }

  // Runs the node. Returns the message of the error, or an empty string and y. `place` is where Y is: apart, in X or in
  // the residual.
  std::string run(size_t place, std::vector<uint8_t>& y) {
    std::vector<uint8_t> x_copy = x, residual_copy = residual, apart(x.size());
    static char nowhere;
    const auto data = [](auto& values) -> void* { return values.empty() ? static_cast<void*>(&nowhere) : values.data(); };
    host::Context context;
    context.refused_from = is_huge ? 0 : SIZE_MAX;
    context.inputs = {{shape, data(x_copy)}, {{}, &scales[0]}, {{}, &zero_points[0]}, {{}, &scales[1]}, {{}, &zero_points[1]}};
    for (size_t i = 0; i < 6; ++i) context.inputs.push_back({parameter_shapes[i], data(parameters[i])});
    if (takes_residual) {
      context.inputs.push_back({residual_shape, data(residual_copy)});
      context.inputs.push_back({{}, &scales[2]});
      context.inputs.push_back({{}, &zero_points[2]});
    }
    host::constants.clear();
    const auto* info = reinterpret_cast<const OrtKernelInfo*>(&node);
    for (size_t i = 1; constant && i < context.inputs.size(); ++i)
      if (i != residual_input) {
        host::constants[{info, i}] = context.inputs[i];
        host::constants[{info, i}].type = op->GetInputType(op, i);
      }
    std::vector<uint8_t>& output = place == 1 ? x_copy : place == 2 && takes_residual ? residual_copy : apart;
    context.output.data = data(output);
    void* state = nullptr;
    OrtStatus* status;
    {
      const Inside inside;
      status = op->CreateKernelV2(op, host::current_api, info, &state);
      if (status == nullptr) status = op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));
      if (state != nullptr) op->KernelDestroy(state);
    }
    if (status == nullptr) {
      CHECK(context.output_made && context.output.shape == shape, "%s: another output shape", describe().c_str());
      y = output;
      return "";
    }
    const std::string message = host::current_api->GetErrorMessage(status);
    host::current_api->ReleaseStatus(status);
    CHECK(!message.empty(), "%s: an error without a message", describe().c_str());
    return message;
  }

  // The element in units of Y's scale before rounding, and the error that a sum in float32 may add.
  double steps(size_t i, double& tolerance) const {
    const size_t channels = parameters[0].size();
    const size_t c = axis == -1 ? i % channels : i / nnorm::count(shape, 2) % channels;
    const double in = double(float(element(0, x[i]) - element(2, zero_points[0])) * scales[0]);
    if (std::isinf(in)) return NAN;  // the kernels clamp numbers beyond float32
    const double h = double(parameters[0][c]) * in + double(parameters[1][c]);
    const double psi = true_psi(h, double(parameters[h < 0 ? 3 : 2][c]));
    double y = double(parameters[4][c]) * psi + double(parameters[5][c]);
    if (name.find("HardSwish") != std::string::npos)
      y *= std::fmin(std::fmax(y / 6 + 0.5, 0), 1);
    else if (name.find("Swish") != std::string::npos)
      y /= 1 + std::exp(-y);
    const double own = y / double(scales[1]);
    tolerance = 1e-6;
    if (!takes_residual) return own;
    const double factor = double(scales[2]) / double(scales[1]);
    tolerance += 4e-7 * (std::fabs(own) + 256 * factor);
    return own + factor * (element(residual_input, residual[i]) - element(residual_input + 2, zero_points[2]));
  }

  void compare(const std::vector<uint8_t>& y) const {
    const bool has_relu = name.find("Relu") != std::string::npos;
    const bool signed_y = is_signed(op->GetOutputType(op, 0));
    const int32_t zero = element(4, zero_points[1]);
    const double least = has_relu ? 0 : (signed_y ? -128 : 0) - zero, greatest = (signed_y ? 127 : 255) - zero;
    for (size_t i = 0; i < y.size(); ++i) {
      double tolerance;
      const double exact = steps(i, tolerance);
      if (!(std::fabs(exact) < 1e25)) continue;  // NaN, or beyond the range of float32, which sums have
      const double clamped = std::fmin(std::fmax(exact, least), greatest);
      const double got = (signed_y ? int32_t(int8_t(y[i])) : int32_t(y[i])) - zero;
      CHECK(std::fabs(got - clamped) <= 0.5 + tolerance, "%s: Y[%zu] is %g steps, true %.9g", describe().c_str(), i, got,
            exact);
      ++figures.elements;
    }
  }

  void check_once() {
    ++figures.cases;
    std::vector<uint8_t> y, again;
    if (random.below(8) == 0) figures.made_to_fail += fails_on_the_way(random, describe(), [&] { return run(0, y); });
    const std::string reason = run(0, y);
    figures.refused += !reason.empty();
    if (!fits || is_huge)
      CHECK(!reason.empty(), "%s: not refused", describe().c_str());
    else
      CHECK(reason.empty() || (may_make_nan && reason.find("make NaN") != std::string::npos), "%s: refused: %s",
            describe().c_str(), reason.c_str());
    if (!reason.empty()) return;
    run(1 + random.below(2), again);
    CHECK(y == again, "%s: in place it differs", describe().c_str());
    compare(y);
  }
};

}  // namespace
}  // namespace nnorm_test

int main(int count, char** arguments) {
  using namespace nnorm_test;
  return fuzz(count, arguments, [](const host::Domain& domain, long cases, Random& random) {
    std::vector<const OrtCustomOp*> operators;
    for (const OrtCustomOp* op : domain.operators)
      if (is_quantized(op)) operators.push_back(op);
    for (long i = 0; i < cases; ++i) Case(operators[random.below(operators.size())], random).check_once();
    CHECK(figures.elements > 20 * cases && figures.refused > cases / 50, "%ld elements compared, %ld refused", figures.elements,
          figures.refused);
    std::printf("%ld cases: %ld refused, %ld made to fail; %ld elements are right\n", figures.cases, figures.refused,
                figures.made_to_fail, figures.elements);
  });
}
