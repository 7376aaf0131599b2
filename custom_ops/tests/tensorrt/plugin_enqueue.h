// Compares the bits of enqueue() of every plugin with a direct call of the kernel, in every layout, with the 16-bit
// arithmetic that the environment selects.
#pragma once

#include <algorithm>
#include <cstring>

#include "channels.h"
#include "cuda_memory.h"
#include "nnorm/same_bits.h"
#include "plugin_host.h"
#include "rows.h"

namespace nnorm_test {
namespace {

template <class T>
constexpr DataType type_of = std::is_same_v<T, float>             ? DataType::kFLOAT
                             : std::is_same_v<T, nnorm::Float16> ? DataType::kHALF
                                                                  : DataType::kBF16;

int32_t enqueue(IPluginV3OneRuntime* runtime, const std::vector<PluginTensorDesc>& inputs, const std::vector<const void*>& data,
                void* y) {
  void* outputs[] = {y};
#if defined(__CUDACC__)
  // Captures and replays a graph, as TensorRT may: enqueue() must do nothing that a capture forbids.
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  must(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  const int32_t result = runtime->enqueue(inputs.data(), inputs.data(), data.data(), outputs, nullptr, stream());
  must(cudaStreamEndCapture(stream(), &graph));
  must(cudaGraphInstantiate(&executable, graph, 0));
  must(cudaGraphLaunch(executable, stream()));
  must(cudaStreamSynchronize(stream()));
  must(cudaGraphExecDestroy(executable));
  must(cudaGraphDestroy(graph));
  return result;
#else
  return runtime->enqueue(inputs.data(), inputs.data(), data.data(), outputs, nullptr, stream());
#endif
}

template <class T>
void test_batch_normal_norm(const Library& library, const std::vector<int64_t>& shape) {
  Random random(1);
  const size_t samples = size_t(shape[0]), channels = size_t(shape[1]);
  size_t extent = 1;
  for (size_t i = 2; i < shape.size(); ++i) extent *= size_t(shape[i]);
  const ChannelParameters<float> parameters(channels, random);
  std::vector<double> numbers(samples * channels * extent), others(numbers.size());
  for (double& number : numbers) number = 2 * random.normal();
  for (double& number : others) number = random.normal();
  const std::vector<T> x = to_type<T>(numbers), residual = to_type<T>(others);

  std::vector<Input<float>> fields;
  for (const float* from : parameters.pointers()) fields.emplace_back(std::vector<float>(from, from + channels), 0);
  std::vector<std::unique_ptr<OnDevice<float>>> fields_there;
  for (Input<float>& field : fields) fields_there.push_back(std::make_unique<OnDevice<float>>(field));

  std::vector<TensorFormat> formats = formats_of(type_of<T>, int(shape.size()));
  std::sort(formats.begin(), formats.end());  // the first is kLINEAR, whose result is expected of the others
  for (const EpilogueFacts& facts : nnorm::epilogues) {
    const std::string name = facts.operator_name;
    std::vector<T> expected;
    for (const TensorFormat format : formats) {
      const bool last = format != TensorFormat::kLINEAR;
      const bool padded = format == TensorFormat::kHWC8 || format == TensorFormat::kDHWC8;
      const size_t lanes = padded ? (channels + 7) / 8 * 8 : channels;
      const auto place = [&](size_t n, size_t c, size_t e) {
        return last ? (n * extent + e) * lanes + c : (n * channels + c) * extent + e;
      };
      const auto laid_out = [&](const std::vector<T>& values) {
        std::vector<T> result(samples * lanes * extent);
        nnorm::narrow(7.0f, result[0]);
        std::fill(result.begin(), result.end(), result[0]);  // in the padding too
        for (size_t n = 0; n < samples; ++n)
          for (size_t c = 0; c < channels; ++c)
            for (size_t e = 0; e < extent; ++e) result[place(n, c, e)] = values[(n * channels + c) * extent + e];
        return result;
      };
      Input<T> x_here(laid_out(x), 0), residual_here(laid_out(residual), 0);
      Output<T> y_here(samples * lanes * extent, 0);
      const OnDevice<T> x_there(x_here), residual_there(residual_here), y_there(y_here);
      std::vector<PluginTensorDesc> inputs{description(shape, type_of<T>, format)};
      std::vector<const void*> data{x_there.data()};
      for (const auto& field : fields_there) {
        inputs.push_back(description({shape[1]}, DataType::kFLOAT, TensorFormat::kLINEAR));
        data.push_back(field->data());
      }
      if (facts.takes_residual) {
        inputs.push_back(inputs[0]);
        data.push_back(residual_there.data());
      }
      Fields attributes;
      const PluginPointer plugin = make(library.creator(name), attributes.collection);
      CHECK(enqueue(runtime(plugin), inputs, data, y_there.data()) == 0, "%s", name.c_str());
      y_there.fetch(y_here);
      CHECK(y_here.guards_hold(), "%s: written outside y", name.c_str());
      const std::vector<T> y = y_here.values();
      if (!last) {
        nnorm::ChannelProblem<T> problem{};
        Output<T> direct(y.size(), 0);
        const OnDevice<T> direct_there(direct);
        problem.x = x_there.data();
        problem.residual = residual_there.data();
        problem.y = direct_there.data();
        for (size_t i = 0; i < fields_there.size(); ++i) problem.parameters[i] = fields_there[i]->data();
        problem.samples = samples;
        problem.channels = channels;
        problem.extent = extent;
        problem.epilogue = facts.epilogue;
        CHECK(nnorm::cuda::run(problem, stream(), nnorm::same_bits_wanted()) == cudaSuccess, "%s", name.c_str());
        direct_there.fetch(direct);
        expected = direct.values();
      }
      size_t different = 0, not_zero = 0;
      for (size_t n = 0; n < samples; ++n)
        for (size_t e = 0; e < extent; ++e)
          for (size_t c = 0; c < lanes; ++c)
            if (c < channels)
              different += std::memcmp(&y[place(n, c, e)], &expected[(n * channels + c) * extent + e], sizeof(T)) != 0;
            else
              not_zero += nnorm::widened(y[place(n, c, e)]) != 0;
      CHECK(different == 0 && not_zero == 0, "%s of %s, format %d: %zu results differ, %zu of padding are not 0", name.c_str(),
            NameOf<T>::value, int(format), different, not_zero);
    }
  }
}

template <class T>
void test_layer_group_normal_norm(const Library& library, const std::string& name, const std::vector<int64_t>& shape, Fields attributes) {
  Random random(2);
  size_t size = 1;
  for (const int64_t extent : shape) size *= size_t(extent);
  const bool layer = name == "LayerNormalNorm";
  std::vector<int64_t> parameter_shape{shape[1]};
  if (layer) parameter_shape.assign(shape.end() + attributes.axis, shape.end());
  size_t length = 1;
  for (const int64_t extent : parameter_shape) length *= size_t(extent);
  const size_t spatial = size / size_t(shape[0] * shape[1]), groups = size_t(attributes.num_groups);
  const RowGeometry geometry = layer ? RowGeometry{size / length, length, 1, 1}
                                     : RowGeometry{size_t(shape[0]) * groups, size_t(shape[1]) / groups * spatial, groups, spatial};
  Rows<T> rows(geometry, normal_numbers(size, random), random);
  rows.epsilon = double(attributes.epsilon);
  rows.delta = double(attributes.delta);
  Input<T> x(rows.x, 0);
  Input<float> weight(rows.weight, 0), bias(rows.bias, 0);
  Output<T> y(size, 0), direct(size, 0);
  const OnDevice<T> x_there(x), y_there(y), direct_there(direct);
  const OnDevice<float> weight_there(weight), bias_there(bias);
  const PluginTensorDesc parameter = description(parameter_shape, DataType::kFLOAT, TensorFormat::kLINEAR);
  const std::vector<PluginTensorDesc> inputs{description(shape, type_of<T>, TensorFormat::kLINEAR), parameter, parameter};
  const PluginPointer plugin = make(library.creator(name, ""), attributes.collection);
  CHECK(runtime(plugin)->onShapeChange(inputs.data(), 3, inputs.data(), 1) == 0, "%s", name.c_str());
  CHECK(enqueue(runtime(plugin), inputs, {x_there.data(), weight_there.data(), bias_there.data()}, y_there.data()) == 0, "%s",
        name.c_str());
  nnorm::RowProblem<T> problem = rows.work(x_there.data(), direct_there.data());
  problem.weight = weight_there.data();
  problem.bias = bias_there.data();
  CHECK(nnorm::cuda::run(problem, stream(), nnorm::same_bits_wanted()) == cudaSuccess, "%s", name.c_str());
  y_there.fetch(y);
  direct_there.fetch(direct);
  CHECK(y.guards_hold() && same_bits(y.values(), direct.values()), "%s of %s", name.c_str(), NameOf<T>::value);
}

template <class T>
void test_enqueue(const Library& library) {
  test_batch_normal_norm<T>(library, {5, 3});
  test_batch_normal_norm<T>(library, {2, 13, 3, 5});
  test_batch_normal_norm<T>(library, {2, 16, 8, 8});
  test_batch_normal_norm<T>(library, {1, 3, 2, 3, 5});
  Fields fields;
  test_layer_group_normal_norm<T>(library, "LayerNormalNorm", {3, 5, 40}, fields);
  fields.axis = -2;
  fields.epsilon = 0.5f;
  test_layer_group_normal_norm<T>(library, "LayerNormalNorm", {3, 5, 40}, fields);
  test_layer_group_normal_norm<T>(library, "GroupNormalNorm", {3, 6, 7, 5}, fields);
  fields.delta = 0;
  fields.num_groups = 6;
  test_layer_group_normal_norm<T>(library, "GroupNormalNorm", {3, 6, 64}, fields);
  if constexpr (std::is_same_v<T, nnorm::Float16>) {  // large enough that the two arithmetics give different bits
    test_batch_normal_norm<T>(library, {2, 16, 48, 48});
    test_layer_group_normal_norm<T>(library, "GroupNormalNorm", {20, 6, 640}, fields);
  }
}

}  // namespace
}  // namespace nnorm_test
