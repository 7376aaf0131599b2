#include "normal_norm_rows.h"

namespace nnorm::ort {
namespace {

// The defaults of nnorm_export/operators/rows.py: ε = 1e-5 and δ = √ε.
constexpr float default_epsilon = 1e-5f, default_delta = 0.0031622776601683794f;

double not_negative(const Attributes& attributes, const char* name, float missing) {
  const float value = attributes.real(name, missing);
  if (!(value >= 0)) refuse(std::string("attribute ") + name + " must be at least 0, it is " + std::to_string(value));
  return double(value);
}

}  // namespace

template <class T>
LayerNormalNorm<T>::LayerNormalNorm(const Attributes& attributes)
    : axis_(attributes.integer("axis", -1)),
      epsilon_(not_negative(attributes, "epsilon", default_epsilon)),
      delta_(not_negative(attributes, "delta", default_delta)) {}

template <class T>
void LayerNormalNorm<T>::operator()(const Run& run) const {
  const Tensor<const T> x = run.input<T>(0);
  const Tensor<const Arithmetic<T>> weight = run.input<Arithmetic<T>>(1), bias = run.input<Arithmetic<T>>(2);
  const int64_t rank = int64_t(x.shape.size());
  if (axis_ < -rank || axis_ >= rank)
    refuse("attribute axis is " + std::to_string(axis_) + ", X " + to_string(x.shape) + " has " + std::to_string(rank) + " axes");
  const size_t first = size_t(axis_ < 0 ? axis_ + rank : axis_);
  const Shape normalized(x.shape.begin() + long(first), x.shape.end());
  if (weight.shape != normalized || bias.shape != normalized)
    refuse("weight and bias must be " + to_string(normalized) + ", the axes of X " + to_string(x.shape) + " from axis " +
           std::to_string(axis_) + "; they are " + to_string(weight.shape) + " and " + to_string(bias.shape));

  RowProblem<T> problem{};
  problem.x = x.data;
  problem.y = run.output<T>(x.shape);
  problem.weight = weight.data;
  problem.bias = bias.data;
  problem.row_length = count(normalized);
  problem.rows = problem.row_length ? count(x.shape) / problem.row_length : 0;
  problem.period = 1;
  problem.run = 1;
  problem.epsilon = epsilon_;
  problem.delta = delta_;
  run.solve(problem);
}

template <class T>
GroupNormalNorm<T>::GroupNormalNorm(const Attributes& attributes)
    : num_groups_(attributes.integer("num_groups", 1)),
      epsilon_(not_negative(attributes, "epsilon", default_epsilon)),
      delta_(not_negative(attributes, "delta", default_delta)) {
  if (num_groups_ < 1) refuse("attribute num_groups must be at least 1, it is " + std::to_string(num_groups_));
}

template <class T>
void GroupNormalNorm<T>::operator()(const Run& run) const {
  using Real = Arithmetic<T>;
  const Tensor<const T> x = run.input<T>(0);
  if (x.shape.size() < 2) refuse("X must be [N, C, *spatial], it is " + to_string(x.shape));
  const Tensor<const Real> weight = run.input<Real>(1), bias = run.input<Real>(2);
  const int64_t channels = x.shape[1];
  if (weight.shape != Shape{channels} || bias.shape != Shape{channels})
    refuse("weight and bias must be [" + std::to_string(channels) + "], one number for each channel of X " +
           to_string(x.shape) + "; they are " + to_string(weight.shape) + " and " + to_string(bias.shape));
  if (channels % num_groups_ != 0)
    refuse("attribute num_groups is " + std::to_string(num_groups_) + ", which does not divide the channels of X " +
           to_string(x.shape));

  RowProblem<T> problem{};
  problem.x = x.data;
  problem.y = run.output<T>(x.shape);
  problem.weight = weight.data;
  problem.bias = bias.data;
  problem.run = count(x.shape, 2);
  problem.row_length = size_t(channels / num_groups_) * problem.run;
  problem.rows = size_t(x.shape[0]) * size_t(num_groups_);
  problem.period = size_t(num_groups_);
  problem.epsilon = epsilon_;
  problem.delta = delta_;
  run.solve(problem);
}

template struct LayerNormalNorm<float>;
template struct LayerNormalNorm<double>;
template struct LayerNormalNorm<Float16>;
template struct LayerNormalNorm<BFloat16>;
template struct GroupNormalNorm<float>;
template struct GroupNormalNorm<double>;
template struct GroupNormalNorm<Float16>;
template struct GroupNormalNorm<BFloat16>;

}  // namespace nnorm::ort
