#include "operation.h"

namespace nnorm::trt {
namespace {

size_t count(const Shape& shape, size_t first_axis = 0) {
  size_t product = 1;
  for (size_t i = first_axis; i < shape.size(); ++i) product *= size_t(shape[i]);
  return product;
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Why the inputs from `begin` to before `end` are not of this shape; nothing if they are.
std::string unlike(const std::vector<Shape>& shapes, size_t begin, size_t end, const Shape& wanted) {
  for (size_t i = begin; i < end; ++i)
    if (shapes[i] != wanted)
      return "input " + std::to_string(i) + " must be " + to_string(wanted) + " for X " + to_string(shapes[0]) + ", it is " +
             to_string(shapes[i]);
  return "";
}

// Calls f with a value of the tensors' type.
template <class F>
cudaError_t with_type(Type type, F f) {
  switch (type) {
    case Type::float32:
      return f(float());
    case Type::float16:
      return f(Float16());
    case Type::bfloat16:
      return f(BFloat16());
  }
  return cudaErrorInvalidValue;
}

template <class T>
const T* input(const Tensors& tensors, size_t index) {
  return static_cast<const T*>(tensors.inputs[index]);
}

constexpr size_t channel_parameters = ChannelProblem<float>::parameter_count;

std::string channels_refusal(const Attributes&, const std::vector<Shape>& shapes) {
  if (shapes[0].size() < 2) return "X must be [N, C, *spatial], it is " + to_string(shapes[0]);
  const std::string reason = unlike(shapes, 1, 1 + channel_parameters, {shapes[0][1]});
  return reason.empty() ? unlike(shapes, 1 + channel_parameters, shapes.size(), shapes[0]) : reason;
}

template <Epilogue epilogue>
cudaError_t run_channels(const Attributes&, const Tensors& tensors, cudaStream_t stream) {
  return with_type(tensors.type, [&](auto type) {
    using T = decltype(type);
    const Shape& shape = tensors.shapes[0];
    ChannelProblem<T> problem{};
    problem.x = input<T>(tensors, 0);
    problem.y = static_cast<T*>(tensors.y);
    for (size_t i = 0; i < channel_parameters; ++i) problem.parameters[i] = input<float>(tensors, 1 + i);
    if (epilogue == Epilogue::add_relu) problem.residual = input<T>(tensors, 1 + channel_parameters);
    problem.samples = size_t(shape[0]);
    problem.channels = size_t(shape[1]);
    problem.extent = count(shape, 2);
    problem.epilogue = epilogue;
    if (tensors.layout == Layout::contiguous) return cuda::run(problem, stream);
    problem.samples *= problem.extent;
    problem.extent = 1;
    constexpr size_t block = 8;
    const size_t padded = (problem.channels + block - 1) / block * block;
    return cuda::run_channels_last(problem, tensors.layout == Layout::channels_last ? problem.channels : padded, stream);
  });
}

template <class T>
RowProblem<T> row_problem(const Attributes& attributes, const Tensors& tensors) {
  RowProblem<T> problem{};
  problem.x = input<T>(tensors, 0);
  problem.y = static_cast<T*>(tensors.y);
  problem.weight = input<float>(tensors, 1);
  problem.bias = input<float>(tensors, 2);
  problem.epsilon = double(attributes.epsilon);
  problem.delta = double(attributes.delta);
  return problem;
}

std::string moments_refusal(const Attributes& attributes) {
  if (attributes.epsilon >= 0 && attributes.delta >= 0) return "";
  return "epsilon and delta must be at least 0, they are " + std::to_string(attributes.epsilon) + " and " +
         std::to_string(attributes.delta);
}

std::string layer_refusal(const Attributes& attributes, const std::vector<Shape>& shapes) {
  const int64_t rank = int64_t(shapes[0].size()), axis = attributes.axis;
  if (axis < -rank || axis >= rank) return "axis is " + std::to_string(axis) + ", X is " + to_string(shapes[0]);
  const Shape normalized(shapes[0].begin() + (axis < 0 ? axis + rank : axis), shapes[0].end());
  const std::string reason = moments_refusal(attributes);
  return reason.empty() ? unlike(shapes, 1, shapes.size(), normalized) : reason;
}

cudaError_t run_layer(const Attributes& attributes, const Tensors& tensors, cudaStream_t stream) {
  return with_type(tensors.type, [&](auto type) {
    auto problem = row_problem<decltype(type)>(attributes, tensors);
    problem.row_length = count(tensors.shapes[1]);
    problem.rows = problem.row_length ? count(tensors.shapes[0]) / problem.row_length : 0;
    problem.period = problem.run = 1;
    return cuda::run(problem, stream);
  });
}

std::string group_refusal(const Attributes& attributes, const std::vector<Shape>& shapes) {
  if (shapes[0].size() < 2) return "X must be [N, C, *spatial], it is " + to_string(shapes[0]);
  if (attributes.num_groups < 1 || shapes[0][1] % attributes.num_groups != 0)
    return "num_groups is " + std::to_string(attributes.num_groups) + ", which does not divide the channels of X " +
           to_string(shapes[0]);
  const std::string reason = moments_refusal(attributes);
  return reason.empty() ? unlike(shapes, 1, shapes.size(), {shapes[0][1]}) : reason;
}

cudaError_t run_group(const Attributes& attributes, const Tensors& tensors, cudaStream_t stream) {
  return with_type(tensors.type, [&](auto type) {
    const Shape& shape = tensors.shapes[0];
    const size_t groups = size_t(attributes.num_groups);
    auto problem = row_problem<decltype(type)>(attributes, tensors);
    problem.run = count(shape, 2);
    problem.row_length = size_t(shape[1]) / groups * problem.run;
    problem.rows = size_t(shape[0]) * groups;
    problem.period = groups;
    return cuda::run(problem, stream);
  });
}

}  // namespace

const std::vector<Operation>& operations() {
  static const Attribute axis{"axis", &Attributes::axis, nullptr}, groups{"num_groups", &Attributes::num_groups, nullptr},
      epsilon{"epsilon", nullptr, &Attributes::epsilon}, delta{"delta", nullptr, &Attributes::delta};
  constexpr int parameters = int(channel_parameters);
  static const std::vector<Operation> all{
      {"BatchNormalNorm", parameters, 0, {}, true, &channels_refusal, &run_channels<Epilogue::none>},
      {"BatchNormalNormRelu", parameters, 0, {}, true, &channels_refusal, &run_channels<Epilogue::relu>},
      {"BatchNormalNormAddRelu", parameters, 1, {}, true, &channels_refusal, &run_channels<Epilogue::add_relu>},
      {"LayerNormalNorm", 2, 0, {axis, epsilon, delta}, false, &layer_refusal, &run_layer},
      {"GroupNormalNorm", 2, 0, {groups, epsilon, delta}, false, &group_refusal, &run_group},
  };
  return all;
}

}  // namespace nnorm::trt
