#include "operation.h"

namespace nnorm::trt {
namespace {

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
    problem.epilogue = epilogue;
    set_sizes(problem, shape);
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

std::string refuse_channels(const Attributes&, const std::vector<Shape>& shapes) { return channels_refusal(shapes); }

std::string refuse_moments(const Attributes& attributes) {
  const std::string reason = attribute_refusal("epsilon", double(attributes.epsilon));
  return reason.empty() ? attribute_refusal("delta", double(attributes.delta)) : reason;
}

std::string refuse_layer(const Attributes& attributes, const std::vector<Shape>& shapes) {
  const std::string reason = refuse_moments(attributes);
  return reason.empty() ? layer_refusal(attributes.axis, shapes) : reason;
}

std::string refuse_group(const Attributes& attributes, const std::vector<Shape>& shapes) {
  std::string reason = refuse_moments(attributes);
  if (reason.empty()) reason = attribute_refusal(int64_t(attributes.num_groups));
  return reason.empty() ? group_refusal(attributes.num_groups, shapes) : reason;
}

cudaError_t run_layer(const Attributes& attributes, const Tensors& tensors, cudaStream_t stream) {
  return with_type(tensors.type, [&](auto type) {
    auto problem = row_problem<decltype(type)>(attributes, tensors);
    set_layer_sizes(problem, tensors.shapes[0], tensors.shapes[1]);
    return cuda::run(problem, stream);
  });
}

cudaError_t run_group(const Attributes& attributes, const Tensors& tensors, cudaStream_t stream) {
  return with_type(tensors.type, [&](auto type) {
    auto problem = row_problem<decltype(type)>(attributes, tensors);
    set_group_sizes(problem, tensors.shapes[0], size_t(attributes.num_groups));
    return cuda::run(problem, stream);
  });
}

}  // namespace

const std::vector<Operation>& operations() {
  static const Attribute axis{"axis", &Attributes::axis, nullptr}, groups{"num_groups", &Attributes::num_groups, nullptr},
      epsilon{"epsilon", nullptr, &Attributes::epsilon}, delta{"delta", nullptr, &Attributes::delta};
  constexpr int parameters = int(channel_parameters);
  static const std::vector<Operation> all{
      {"BatchNormalNorm", parameters, 0, {}, true, &refuse_channels, &run_channels<Epilogue::none>},
      {"BatchNormalNormRelu", parameters, 0, {}, true, &refuse_channels, &run_channels<Epilogue::relu>},
      {"BatchNormalNormAddRelu", parameters, 1, {}, true, &refuse_channels, &run_channels<Epilogue::add_relu>},
      {"LayerNormalNorm", 2, 0, {axis, epsilon, delta}, false, &refuse_layer, &run_layer},
      {"GroupNormalNorm", 2, 0, {groups, epsilon, delta}, false, &refuse_group, &run_group},
  };
  return all;
}

}  // namespace nnorm::trt
