#include "batch_normal_norm.h"

namespace nnorm::ort {

template <class T>
ChannelProblem<T> channel_problem(const Run& run, Epilogue epilogue, Shape& shape) {
  ChannelProblem<T> problem{};
  std::vector<Shape> shapes;
  problem.x = run.input<T>(0, shapes);
  for (size_t i = 0; i < problem.parameter_count; ++i) problem.parameters[i] = run.input<Arithmetic<T>>(1 + i, shapes);
  if (epilogue == Epilogue::add_relu) problem.residual = run.input<T>(1 + problem.parameter_count, shapes);
  problem.epilogue = epilogue;
  refuse(channels_refusal(shapes));
  set_sizes(problem, shapes[0]);
  shape = shapes[0];
  return problem;
}

template <class T>
void batch_normal_norm(const Run& run, Epilogue epilogue) {
  Shape shape;
  ChannelProblem<T> problem = channel_problem<T>(run, epilogue, shape);
  problem.y = run.output<T>(shape);
  run.solve(problem);
}

#define NNORM_INSTANTIATE(T)                                                         \
  template ChannelProblem<T> channel_problem<T>(const Run&, Epilogue, Shape& shape); \
  template void batch_normal_norm<T>(const Run&, Epilogue);
NNORM_FOR_EACH_TYPE(NNORM_INSTANTIATE)
#undef NNORM_INSTANTIATE

}  // namespace nnorm::ort
