#include "layer_group_normal_norm.h"

namespace nnorm::ort {
namespace {

double not_negative(const Attributes& attributes, const char* name, float missing) {
  const double value = attributes.real(name, missing);
  refuse(attribute_refusal(name, value));
  return value;
}

}  // namespace

template <class T>
NormalNormRows<T>::NormalNormRows(const Attributes& attributes)
    : epsilon_(not_negative(attributes, "epsilon", default_epsilon)),
      delta_(not_negative(attributes, "delta", default_delta)) {}

template <class T>
RowProblem<T> NormalNormRows<T>::problem(const Run& run, std::vector<Shape>& shapes) const {
  RowProblem<T> problem{};
  problem.x = run.input<T>(0, shapes);
  problem.weight = run.input<Arithmetic<T>>(1, shapes);
  problem.bias = run.input<Arithmetic<T>>(2, shapes);
  problem.epsilon = epsilon_;
  problem.delta = delta_;
  return problem;
}

template <class T>
LayerNormalNorm<T>::LayerNormalNorm(const Attributes& attributes)
    : NormalNormRows<T>(attributes), axis_(attributes.integer("axis", default_axis)) {}

template <class T>
void LayerNormalNorm<T>::operator()(const Run& run) const {
  std::vector<Shape> shapes;
  RowProblem<T> problem = this->problem(run, shapes);
  refuse(layer_refusal(axis_, shapes));
  set_layer_sizes(problem, shapes[0], shapes[1]);
  problem.y = run.output<T>(shapes[0]);
  run.solve(problem);
}

template <class T>
GroupNormalNorm<T>::GroupNormalNorm(const Attributes& attributes)
    : NormalNormRows<T>(attributes), num_groups_(attributes.integer("num_groups", default_groups)) {
  refuse(attribute_refusal(num_groups_));
}

template <class T>
void GroupNormalNorm<T>::operator()(const Run& run) const {
  std::vector<Shape> shapes;
  RowProblem<T> problem = this->problem(run, shapes);
  refuse(group_refusal(num_groups_, shapes));
  set_group_sizes(problem, shapes[0], size_t(num_groups_));
  problem.y = run.output<T>(shapes[0]);
  run.solve(problem);
}

#define NNORM_INSTANTIATE(T)         \
  template struct LayerNormalNorm<T>; \
  template struct GroupNormalNorm<T>;
NNORM_FOR_EACH_TYPE(NNORM_INSTANTIATE)
#undef NNORM_INSTANTIATE

}  // namespace nnorm::ort
