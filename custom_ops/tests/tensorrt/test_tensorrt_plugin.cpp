// The plugins as TensorRT drives them, without TensorRT: its interfaces are headers, and this program calls them in its
// place. It does not test the parser, the builder or what fuses with what.
//
// CMake builds this for the processor, where enqueue() runs the kernels by cuda_on_host.h, and with CUDA.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "channels.h"
#include "check.h"
#include "cuda_memory.h"
#include "rows.h"

namespace nnorm_test {
namespace {

using namespace nvinfer1;

const char* const names[] = {"BatchNormalNorm", "BatchNormalNormRelu", "BatchNormalNormAddRelu", "LayerNormalNorm",
                             "GroupNormalNorm"};

int inputs_of(const std::string& name) { return name == "BatchNormalNormAddRelu" ? 8 : name[0] == 'B' ? 7 : 3; }

void* open_library(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::printf("%s\n", dlerror());
  return library;
}

class Library {
 public:
  explicit Library(const char* path) : library_(open_library(path)) {
    if (!CHECK(library_ != nullptr, "%s", path)) return;
    const auto get = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library_, "getCreators"));
    const auto set_finder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library_, "setLoggerFinder"));
    if (!CHECK(get != nullptr && set_finder != nullptr, "%s lacks a function", path)) return;
    set_finder(nullptr);
    int32_t count = 0;
    IPluginCreatorInterface* const* creators = get(count);
    for (int32_t i = 0; i < count; ++i) creators_.push_back(static_cast<IPluginCreatorV3One*>(creators[i]));
  }

  const std::vector<IPluginCreatorV3One*>& creators() const { return creators_; }

  IPluginCreatorV3One* creator(const std::string& name, const std::string& plugin_namespace = "nnorm") const {
    for (IPluginCreatorV3One* creator : creators_)
      if (creator->getPluginName() == name && creator->getPluginNamespace() == plugin_namespace) return creator;
    return nullptr;
  }

 private:
  void* library_;
  std::vector<IPluginCreatorV3One*> creators_;
};

struct Fields {
  int32_t axis = -1, num_groups = 2;
  float epsilon = 1e-5f, delta = 0.003f;
  std::vector<PluginField> fields{{"axis", &axis, PluginFieldType::kINT32, 1},
                                  {"num_groups", &num_groups, PluginFieldType::kINT32, 1},
                                  {"epsilon", &epsilon, PluginFieldType::kFLOAT32, 1},
                                  {"delta", &delta, PluginFieldType::kFLOAT32, 1},
                                  {"plugin_namespace", "nnorm", PluginFieldType::kCHAR, 6}};
  PluginFieldCollection collection{int32_t(fields.size()), fields.data()};
};

using PluginPointer = std::unique_ptr<IPluginV3>;

PluginPointer make(IPluginCreatorV3One* creator, const PluginFieldCollection& fields) {
  return PluginPointer(creator->createPlugin("node", &fields, TensorRTPhase::kBUILD));
}

template <class Capability>
Capability* capability(IPluginV3& plugin, PluginCapabilityType type) {
  return static_cast<Capability*>(plugin.getCapabilityInterface(type));
}
IPluginV3OneBuild* build(const PluginPointer& plugin) {
  return capability<IPluginV3OneBuild>(*plugin, PluginCapabilityType::kBUILD);
}
IPluginV3OneRuntime* runtime(const PluginPointer& plugin) {
  return capability<IPluginV3OneRuntime>(*plugin, PluginCapabilityType::kRUNTIME);
}

void test_creators(const Library& library) {
  std::set<std::string> seen;
  for (IPluginCreatorV3One* creator : library.creators()) {
    seen.insert(std::string(creator->getPluginNamespace()) + "::" + creator->getPluginName());
    CHECK(std::strcmp(creator->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") == 0, "%s", creator->getInterfaceInfo().kind);
    CHECK(creator->getAPILanguage() == APILanguage::kCPP, "%s", creator->getPluginName());
    CHECK(std::strcmp(creator->getPluginVersion(), "1") == 0, "version %s", creator->getPluginVersion());
  }
  CHECK(seen.size() == 10 && library.creators().size() == 10, "%zu creators", seen.size());
  for (const std::string name : names) CHECK(seen.count("nnorm::" + name) && seen.count("::" + name), "%s", name.c_str());
}

std::string field_names(const PluginFieldCollection* fields) {
  std::string text;
  for (int32_t i = 0; i < fields->nbFields; ++i) text += std::string(fields->fields[i].name) + " ";
  return text;
}

void test_fields(const Library& library) {
  const std::string of_channels, of_layer = "axis epsilon delta ", of_group = "num_groups epsilon delta ";
  for (const std::string name : names) {
    IPluginCreatorV3One* creator = library.creator(name);
    const std::string expected = name == "LayerNormalNorm" ? of_layer : name == "GroupNormalNorm" ? of_group : of_channels;
    CHECK(field_names(creator->getFieldNames()) == expected, "%s has the fields %s", name.c_str(),
          field_names(creator->getFieldNames()).c_str());

    // Made, copied, the copy's fields written down, made again from these: each after the one before is gone.
    Fields fields;
    PluginPointer plugin = make(creator, fields.collection);
    CHECK(plugin != nullptr, "%s", name.c_str());
    const std::string description = build(plugin)->getMetadataString();
    PluginPointer copy(plugin->clone());
    plugin.reset();
    PluginPointer again = make(creator, *runtime(copy)->getFieldsToSerialize());
    copy.reset();
    PluginPointer attached(runtime(again)->attachToContext(nullptr));
    CHECK(attached != nullptr && attached != again, "%s", name.c_str());
    again.reset();
    CHECK(description == build(attached)->getMetadataString(), "%s became %s", description.c_str(), build(attached)->getMetadataString());
    CHECK(field_names(runtime(attached)->getFieldsToSerialize()) == expected, "%s", name.c_str());
    const auto* core = capability<IPluginV3OneCore>(*attached, PluginCapabilityType::kCORE);
    CHECK(core->getPluginName() == name && std::strcmp(core->getPluginNamespace(), "nnorm") == 0, "%s", core->getPluginName());
  }

  // Of another type or length; 64 bits are what Python has.
  const int64_t wide_axis = -2, too_wide = int64_t(1) << 32;
  const double wide_epsilon = 0.25;
  const float real = 1;
  for (const auto& [field, good] : std::initializer_list<std::pair<PluginField, bool>>{
           {{"axis", &wide_axis, PluginFieldType::kINT64, 1}, true},
           {{"epsilon", &wide_epsilon, PluginFieldType::kFLOAT64, 1}, true},
           {{"axis", &real, PluginFieldType::kFLOAT32, 1}, false},
           {{"epsilon", &wide_axis, PluginFieldType::kINT32, 1}, false},
           {{"axis", &wide_axis, PluginFieldType::kINT64, 2}, false},
           {{"axis", nullptr, PluginFieldType::kINT64, 1}, false},
           {{"axis", &too_wide, PluginFieldType::kINT64, 1}, false},
           {{"unknown", &real, PluginFieldType::kFLOAT32, 1}, true}}) {
    const PluginFieldCollection collection{1, &field};
    const PluginPointer plugin = make(library.creator("LayerNormalNorm"), collection);
    CHECK((plugin != nullptr) == good, "%s of type %d", field.name, int(field.type));
    if (plugin && field.data == &wide_axis)
      CHECK(std::strstr(build(plugin)->getMetadataString(), "axis=-2 "), "%s", build(plugin)->getMetadataString());
  }
}

void test_build(const Library& library) {
  Fields fields;
  for (const std::string name : names) {
    const PluginPointer plugin = make(library.creator(name), fields.collection);
    IPluginV3OneBuild* const builder = build(plugin);
    const int count = inputs_of(name);
    CHECK(builder->getNbOutputs() == 1 && builder->getNbTactics() == 0, "%s", name.c_str());
    std::vector<DataType> types(size_t(count), DataType::kFLOAT);
    types[0] = DataType::kBF16;
    DataType output;
    CHECK(builder->getOutputDataTypes(&output, 1, types.data(), count) == 0 && output == DataType::kBF16, "%s", name.c_str());
    CHECK(builder->getOutputDataTypes(&output, 1, types.data(), count - 1) != 0, "%s", name.c_str());
    // The shapes of inputs are expressions, handed through unread.
    std::vector<DimsExprs> inputs{size_t(count)};
    DimsExprs y{};
    const char expression[2] = {};
    inputs[0].nbDims = 2;
    for (int i = 0; i < 2; ++i) inputs[0].d[i] = reinterpret_cast<const IDimensionExpr*>(&expression[i]);
    alignas(16) char builder_of_expressions[64] = {};
    CHECK(builder->getOutputShapes(inputs.data(), count, nullptr, 0, &y, 1,
                                   *reinterpret_cast<IExprBuilder*>(builder_of_expressions)) == 0 &&
              y.nbDims == 2 && y.d[1] == inputs[0].d[1],
          "%s", name.c_str());
    std::vector<DynamicPluginTensorDesc> in{size_t(count)}, out{1};
    CHECK(builder->configurePlugin(in.data(), count, out.data(), 1) == 0, "%s", name.c_str());
    CHECK(builder->getWorkspaceSize(in.data(), count, out.data(), 1) == 0, "%s", name.c_str());
  }
}

// Every combination that the builder would find, going through tensors one by one.
void test_formats(const Library& library) {
  constexpr int formats = 13;
  const DataType types[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT8, DataType::kINT32};
  Fields fields;
  for (const std::string name : names) {
    const PluginPointer plugin = make(library.creator(name), fields.collection);
    IPluginV3OneBuild* const builder = build(plugin);
    const int count = inputs_of(name);
    for (const int rank : {2, 3, 4, 5}) {
      std::vector<DynamicPluginTensorDesc> tensors{size_t(count + 1)};
      for (DynamicPluginTensorDesc& tensor : tensors) tensor.desc.dims.nbDims = rank;
      std::vector<std::pair<DataType, int>> found;  // of X; the others follow from it
      const std::function<void(int)> go = [&](int position) {
        if (position > count) {
          found.emplace_back(tensors[0].desc.type, int(tensors[0].desc.format));
          const PluginTensorDesc &y = tensors[size_t(count)].desc, &x = tensors[0].desc;
          CHECK(y.type == x.type && y.format == x.format, "%s: Y is not like X", name.c_str());
          return;
        }
        for (const DataType type : types)
          for (int format = 0; format < formats; ++format) {
            tensors[size_t(position)].desc.type = type;
            tensors[size_t(position)].desc.format = TensorFormat(format);
            if (builder->supportsFormatCombination(position, tensors.data(), count, 1)) go(position + 1);
            tensors[size_t(position)].desc.type = type;
          }
      };
      go(0);
      const bool channels_last = name[0] == 'B' && rank >= 4;
      CHECK(int(found.size()) == (channels_last ? 6 : 3) && int(found.size()) <= builder->getFormatCombinationLimit(),
            "%s, rank %d: %zu combinations", name.c_str(), rank, found.size());
      for (const auto& [type, format] : found)
        if (TensorFormat(format) != TensorFormat::kLINEAR) {
          const bool wide = type == DataType::kFLOAT;
          const TensorFormat expected = rank == 4 ? (wide ? TensorFormat::kHWC : TensorFormat::kHWC8)
                                                  : (wide ? TensorFormat::kDHWC : TensorFormat::kDHWC8);
          CHECK(TensorFormat(format) == expected, "%s, rank %d: format %d", name.c_str(), rank, format);
        }
    }
  }
}

Dims dims(const std::vector<int64_t>& shape) {
  Dims result{};
  result.nbDims = int32_t(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) result.d[i] = shape[i];
  return result;
}

void test_shapes(const Library& library) {
  using Shape = std::vector<int64_t>;
  struct Case {
    const char* name;
    Shape x, parameters, operand;
    bool good;
  };
  for (const Case& c : std::initializer_list<Case>{{"BatchNormalNorm", {2, 6, 3}, {6}, {}, true},
                                                   {"BatchNormalNorm", {2, 6, 3}, {3}, {}, false},
                                                   {"BatchNormalNorm", {6}, {6}, {}, false},
                                                   {"BatchNormalNormAddRelu", {2, 6, 3}, {6}, {2, 6, 3}, true},
                                                   {"BatchNormalNormAddRelu", {2, 6, 3}, {6}, {1, 6, 3}, false},
                                                   {"LayerNormalNorm", {2, 6, 3}, {3}, {}, true},
                                                   {"LayerNormalNorm", {2, 6, 3}, {6, 3}, {}, false},
                                                   {"GroupNormalNorm", {2, 6, 3}, {6}, {}, true},
                                                   {"GroupNormalNorm", {2, 5, 3}, {5}, {}, false}}) {
    Fields fields;
    const PluginPointer plugin = make(library.creator(c.name), fields.collection);
    std::vector<PluginTensorDesc> inputs{size_t(inputs_of(c.name))};
    for (PluginTensorDesc& input : inputs) input.dims = dims(c.parameters);
    inputs[0].dims = dims(c.x);
    if (!c.operand.empty()) inputs.back().dims = dims(c.operand);
    const PluginTensorDesc y = inputs[0];
    CHECK((runtime(plugin)->onShapeChange(inputs.data(), int32_t(inputs.size()), &y, 1) == 0) == c.good, "%s", c.name);
  }
}

template <class T>
constexpr DataType type_of = std::is_same_v<T, float>             ? DataType::kFLOAT
                             : std::is_same_v<T, nnorm::Float16> ? DataType::kHALF
                                                                  : DataType::kBF16;

int32_t enqueue(IPluginV3OneRuntime* runtime, const std::vector<PluginTensorDesc>& inputs, const std::vector<const void*>& data,
                void* y) {
  void* outputs[] = {y};
#if defined(__CUDACC__)
  // Captured and replayed, as TensorRT may: nothing that a capture forbids happens in between.
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

PluginTensorDesc description(const std::vector<int64_t>& shape, DataType type, TensorFormat format) {
  PluginTensorDesc result{};
  result.dims = dims(shape);
  result.type = type;
  result.format = format;
  return result;
}

// What enqueue() gives is what the kernels give, to the bit, in every layout.
template <class T>
void test_channels(const Library& library, const std::vector<int64_t>& shape) {
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

  const bool wide = sizeof(T) == 4;
  std::vector<TensorFormat> formats{TensorFormat::kLINEAR};
  if (shape.size() == 4) formats.push_back(wide ? TensorFormat::kHWC : TensorFormat::kHWC8);
  if (shape.size() == 5) formats.push_back(wide ? TensorFormat::kDHWC : TensorFormat::kDHWC8);
  for (const Epilogue epilogue : {Epilogue::none, Epilogue::relu, Epilogue::add_relu}) {
    const std::string name = names[int(epilogue)];
    std::vector<T> expected;
    for (const TensorFormat format : formats) {
      const bool last = format != TensorFormat::kLINEAR;
      const size_t lanes = last && !wide ? (channels + 7) / 8 * 8 : channels;
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
      if (epilogue == Epilogue::add_relu) {
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
        problem.epilogue = epilogue;
        CHECK(nnorm::cuda::run(problem, stream()) == cudaSuccess, "%s", name.c_str());
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
void test_rows(const Library& library, const std::string& name, const std::vector<int64_t>& shape, Fields attributes) {
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
  CHECK(nnorm::cuda::run(problem, stream()) == cudaSuccess, "%s", name.c_str());
  y_there.fetch(y);
  direct_there.fetch(direct);
  CHECK(y.guards_hold() && same_bits(y.values(), direct.values()), "%s of %s", name.c_str(), NameOf<T>::value);
}

template <class T>
void test_enqueue(const Library& library) {
  test_channels<T>(library, {5, 3});
  test_channels<T>(library, {2, 13, 3, 5});
  test_channels<T>(library, {2, 16, 8, 8});
  test_channels<T>(library, {1, 3, 2, 3, 5});
  Fields fields;
  test_rows<T>(library, "LayerNormalNorm", {3, 5, 40}, fields);
  fields.axis = -2;
  fields.epsilon = 0.5f;
  test_rows<T>(library, "LayerNormalNorm", {3, 5, 40}, fields);
  test_rows<T>(library, "GroupNormalNorm", {3, 6, 7, 5}, fields);
  fields.delta = 0;
  fields.num_groups = 6;
  test_rows<T>(library, "GroupNormalNorm", {3, 6, 64}, fields);
}

// Where there is no GPU, enqueue() of the library that users get says so. Where there is a driver, it is not tried.
void test_without_gpu(const char* path) {
  if (void* driver = dlopen("libcuda.so.1", RTLD_LAZY)) {
    dlclose(driver);
    return;
  }
  const Library library(path);
  test_creators(library);
  Fields fields;
  const PluginPointer plugin = make(library.creator("LayerNormalNorm"), fields.collection);
  const PluginTensorDesc x = description({2, 4}, DataType::kFLOAT, TensorFormat::kLINEAR),
                         parameter = description({4}, DataType::kFLOAT, TensorFormat::kLINEAR);
  std::vector<float> numbers(8, 1);
  CHECK(enqueue(runtime(plugin), {x, parameter, parameter}, {numbers.data(), numbers.data(), numbers.data()}, numbers.data()) != 0,
        "%s", path);
}

void test_registration(const char* mock_path, const char* path) {
  void* mock = open_library(mock_path);
  if (!CHECK(mock != nullptr, "%s", mock_path)) return;
  CHECK(open_library(path) != nullptr, "%s", path);
  const std::string notes = reinterpret_cast<const char* (*)()>(dlsym(mock, "mock_nvinfer_notes"))();
  CHECK(notes.find("WRONG") == std::string::npos && std::count(notes.begin(), notes.end(), ' ') == 10, "%s", notes.c_str());
  for (const std::string name : names)
    CHECK(notes.find("nnorm::" + name + " ") != std::string::npos, "%s", notes.c_str());
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  if (!have_device()) {
    std::printf("skipped: no GPU that CUDA can use\n");
    return skipped;
  }
  const Library library(NNORM_PLUGINS);
  test_creators(library);
  test_fields(library);
  test_build(library);
  test_formats(library);
  test_shapes(library);
  test_enqueue<float>(library);
  test_enqueue<nnorm::Float16>(library);
  test_enqueue<nnorm::BFloat16>(library);
#if defined(NNORM_PLUGINS_FOR_GPU)
  test_without_gpu(NNORM_PLUGINS_FOR_GPU);
  test_registration(NNORM_MOCK_NVINFER, NNORM_PLUGINS_REGISTER);
#endif
  return finish();
}
