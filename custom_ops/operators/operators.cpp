#include "nnorm/operators.h"

namespace nnorm {
namespace {

// The inputs after X, in their order (nnorm_export/operators/batch_normal_norm.py).
constexpr const char* parameter_names[] = {"scale", "shift", "exponent_pos", "exponent_neg", "weight", "bias"};
constexpr size_t parameter_count = ChannelProblem<float>::parameter_count;

// For operators whose inputs are X, weight and bias.
std::string affine_refusal(const Shape& wanted, const std::string& what, const std::vector<Shape>& shapes) {
  if (shapes[1] == wanted && shapes[2] == wanted) return "";
  return "weight and bias must be " + to_string(wanted) + ", " + what + "; they are " + to_string(shapes[1]) + " and " +
         to_string(shapes[2]);
}

std::string batch_refusal(const Shape& x) {
  return x.size() < 2 ? "X must be [N, C, *spatial], it is " + to_string(x) : "";
}

}  // namespace

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

size_t count(const Shape& shape, size_t first_axis) {
  size_t product = 1;
  for (size_t i = first_axis; i < shape.size(); ++i) product *= size_t(shape[i]);
  return product;
}

std::string channels_refusal(const std::vector<Shape>& shapes) {
  const Shape& x = shapes[0];
  if (x.size() < 2) return batch_refusal(x);
  for (size_t i = 0; i < parameter_count; ++i)
    if (shapes[1 + i].size() != 1 || shapes[1 + i][0] != x[1])
      return std::string(parameter_names[i]) + " must be [" + std::to_string(x[1]) + "], one number for each channel of X " +
             to_string(x) + "; it is " + to_string(shapes[1 + i]);
  if (shapes.size() > 1 + parameter_count && shapes.back() != x)
    return "residual must have the shape of X, " + to_string(x) + "; it is " + to_string(shapes.back());
  return "";
}

std::string layer_refusal(int64_t axis, const std::vector<Shape>& shapes) {
  const Shape& x = shapes[0];
  const int64_t rank = int64_t(x.size());
  if (axis < -rank || axis >= rank)
    return "attribute axis is " + std::to_string(axis) + ", X " + to_string(x) + " has " + std::to_string(rank) + " axes";
  const Shape normalized(x.begin() + (axis < 0 ? axis + rank : axis), x.end());
  return affine_refusal(normalized, "the axes of X " + to_string(x) + " from axis " + std::to_string(axis), shapes);
}

std::string group_refusal(int64_t num_groups, const std::vector<Shape>& shapes) {
  const Shape& x = shapes[0];
  if (x.size() < 2) return batch_refusal(x);
  const std::string reason = affine_refusal({x[1]}, "one number for each channel of X " + to_string(x), shapes);
  if (!reason.empty() || x[1] % num_groups == 0) return reason;
  return "attribute num_groups is " + std::to_string(num_groups) + ", which does not divide the channels of X " + to_string(x);
}

std::string attribute_refusal(const char* name, double value) {
  if (value >= 0) return "";  // NaN is refused
  return std::string("attribute ") + name + " must be at least 0, it is " + std::to_string(value);
}

std::string attribute_refusal(int64_t num_groups) {
  return num_groups < 1 ? "attribute num_groups must be at least 1, it is " + std::to_string(num_groups) : "";
}

}  // namespace nnorm
