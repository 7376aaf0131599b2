// Makes the tables of quantized norms with the float64 kernels.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "nnorm/kernels.h"
#include "nnorm/quantized.h"

namespace nnorm {
namespace {

double activated(Activation activation, double y) {
  switch (activation) {
#define NNORM_CASE(activation, name, value) \
  case Activation::activation:              \
    return value;
    NNORM_FOR_EACH_ACTIVATION(NNORM_CASE)
#undef NNORM_CASE
    case Activation::none:
      break;
  }
  return y;
}

// y before the epilogue, activated, in units of Y's scale, for each channel and byte of X: [channels][table_entries].
std::vector<double> steps_of(const QuantizedNorm& norm) {
  const size_t channels = norm.channels, size = channels * table_entries;
  std::vector<double> x(size), y(size), parameters(6 * channels), prepared(size_t(ChannelField::count) * channels);
  ChannelProblem<double> problem{};
  for (size_t i = 0; i < 6; ++i) {
    std::copy_n(norm.parameters[i], channels, &parameters[i * channels]);
    problem.parameters[i] = &parameters[i * channels];
  }
  // x rounded to float32, as DequantizeLinear computes it.
  for (size_t i = 0; i < size; ++i)
    x[i] = double(float(norm.x.element(i % table_entries) - norm.x.zero_point) * norm.x.scale);
  const KernelTable<double>& kernels = best_instruction_set().table<double>();
  kernels.prepare_channels(problem.parameters, channels, 1, prepared.data());
  ChannelWork<double> work{};
  work.x = x.data();
  work.y = y.data();
  work.table = prepared.data();
  work.table_width = channels;
  work.size = size;
  work.row_length = table_entries;
  work.period = channels;
  work.sharing = Sharing::row;
  work.epilogue = Epilogue::none;
  kernels.batch_normal_norm(work, 0, count_items(work));
  for (double& value : y) value = activated(norm.activation, value) / double(norm.y.scale);
  return y;
}

std::string scale_refusal(const char* name, const Quantization& quantization) {
  if (quantization.scale > 0 && quantization.scale <= std::numeric_limits<float>::max()) return "";  // NaN is refused
  char text[32];
  std::snprintf(text, sizeof text, "%g", double(quantization.scale));
  return std::string(name) + " must be greater than 0 and finite, it is " + text;
}

}  // namespace

std::string scale_refusal(const QuantizedNorm& norm) {
  if (std::string reason = scale_refusal("x_scale", norm.x); !reason.empty()) return reason;
  if (std::string reason = scale_refusal("y_scale", norm.y); !reason.empty()) return reason;
  return epilogues[size_t(norm.epilogue)].takes_residual ? scale_refusal("residual_scale", norm.residual) : "";
}

size_t make_table(const QuantizedNorm& norm, QuantizedTable& table) {
  const std::vector<double> steps = norm.channels ? steps_of(norm) : std::vector<double>();
  for (size_t i = 0; i < steps.size(); ++i)
    if (steps[i] != steps[i]) return i / table_entries;
  table.channels = norm.channels;
  table.bytes.clear();
  table.steps.clear();
  QuantizedSum& sum = table.sum;
  sum.zero_point = norm.y.zero_point;
  // A ReLU is the lower bound 0: steps are counted from y = 0.
  const bool has_relu = norm.epilogue != Epilogue::none;
  sum.least = has_relu ? 0.0f : float(norm.y.least() - norm.y.zero_point);
  sum.greatest = float(norm.y.greatest() - norm.y.zero_point);
  if (epilogues[size_t(norm.epilogue)].takes_residual) {
    constexpr double most = 1e30;  // replaces infinities, whose sum or product may be NaN
    sum.sign_flip = norm.residual.is_signed ? 0x80 : 0;
    sum.offset = float(norm.residual.zero_point - norm.residual.least());
    sum.factor = float(std::min(double(norm.residual.scale) / double(norm.y.scale), most));
    for (const double step : steps) table.steps.push_back(float(std::clamp(step, -most, most)));
    return norm.channels;
  }
  for (const double step : steps) {
    const double clamped = std::clamp(step, double(sum.least), double(sum.greatest));
    table.bytes.push_back(uint8_t(int32_t(std::nearbyint(clamped)) + sum.zero_point));
  }
  return norm.channels;
}

}  // namespace nnorm
