#include "batch_normal_norm.h"

namespace nnorm::ort {
namespace {

// The names of the inputs after X, in their order (nnorm_export/operators/batch_normal_norm.py).
constexpr const char* parameter_names[] = {"scale", "shift", "exponent_pos", "exponent_neg", "weight", "bias"};

}  // namespace

template <class T>
ChannelProblem<T> channel_problem(const Run& run, Epilogue epilogue, const Tensor<const T>& x) {
  if (x.shape.size() < 2) refuse("X must be [N, C, *spatial], it is " + to_string(x.shape));
  ChannelProblem<T> problem{};
  problem.x = x.data;
  problem.samples = size_t(x.shape[0]);
  problem.channels = size_t(x.shape[1]);
  problem.extent = count(x.shape, 2);
  problem.epilogue = epilogue;
  for (size_t i = 0; i < problem.parameter_count; ++i) {
    const Tensor<const Arithmetic<T>> parameter = run.input<Arithmetic<T>>(1 + i);
    if (parameter.shape != Shape{x.shape[1]})
      refuse(std::string(parameter_names[i]) + " must be [" + std::to_string(x.shape[1]) +
             "], one number for each channel of X " + to_string(x.shape) + "; it is " + to_string(parameter.shape));
    problem.parameters[i] = parameter.data;
  }
  if (epilogue == Epilogue::add_relu) {
    const Tensor<const T> residual = run.input<T>(1 + problem.parameter_count);
    if (residual.shape != x.shape)
      refuse("residual must have the shape of X, " + to_string(x.shape) + "; it is " + to_string(residual.shape));
    problem.residual = residual.data;
  }
  return problem;
}

template <class T>
void batch_normal_norm(const Run& run, Epilogue epilogue) {
  const Tensor<const T> x = run.input<T>(0);
  ChannelProblem<T> problem = channel_problem(run, epilogue, x);
  problem.y = run.output<T>(x.shape);
  run.solve(problem);
}

#define NNORM_FOR_TYPE(T)                                                                              \
  template ChannelProblem<T> channel_problem(const Run&, Epilogue, const Tensor<const T>&); \
  template void batch_normal_norm<T>(const Run&, Epilogue);
NNORM_FOR_TYPE(float)
NNORM_FOR_TYPE(double)
NNORM_FOR_TYPE(Float16)
NNORM_FOR_TYPE(BFloat16)
#undef NNORM_FOR_TYPE

}  // namespace nnorm::ort
