// The plugins without TensorRT: TensorRT's interfaces are in its headers, and this program calls the plugins as TensorRT
// does. It does not test the parser, the builder or fusion.
//
// CMake builds this for the CPU, where enqueue() runs the kernels by cuda_on_host.h, and with CUDA.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "environment.h"
#include "plugin_enqueue.h"
#include "plugin_host.h"

namespace nnorm_test {
namespace {

void test_creators(const Library& library) {
  std::set<std::string> seen;
  for (IPluginCreatorV3One* creator : library.creators()) {
    seen.insert(std::string(creator->getPluginNamespace()) + "::" + creator->getPluginName());
    CHECK(std::strcmp(creator->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") == 0, "%s", creator->getInterfaceInfo().kind);
    CHECK(creator->getAPILanguage() == APILanguage::kCPP, "%s", creator->getPluginName());
    CHECK(std::strcmp(creator->getPluginVersion(), "1") == 0, "version %s", creator->getPluginVersion());
  }
  const size_t expected = 2 * operators().size();
  CHECK(seen.size() == expected && library.creators().size() == expected, "%zu creators", seen.size());
  for (const auto& [name, inputs, any_layout] : operators())
    CHECK(seen.count("nnorm::" + name) && seen.count("::" + name), "%s", name.c_str());
  // Listed here because operators() is under test. New epilogues may add operators.
  const OperatorFacts known[] = {{"BatchNormalNorm", 7, true},
                                 {"BatchNormalNormRelu", 7, true},
                                 {"BatchNormalNormAddRelu", 8, true},
                                 {"LayerNormalNorm", 3, false},
                                 {"GroupNormalNorm", 3, false}};
  for (const OperatorFacts& wanted : known) {
    bool found = false;
    for (const OperatorFacts& declared : operators())
      found |= declared.name == wanted.name && declared.inputs == wanted.inputs && declared.any_layout == wanted.any_layout;
    CHECK(found, "%s with %d inputs", wanted.name.c_str(), wanted.inputs);
  }
}

std::string field_names(const PluginFieldCollection* fields) {
  std::string text;
  for (int32_t i = 0; i < fields->nbFields; ++i) text += std::string(fields->fields[i].name) + " ";
  return text;
}

void test_fields(const Library& library) {
  std::map<std::string, std::string> all_expected{{"LayerNormalNorm", "axis epsilon delta "},
                                                  {"GroupNormalNorm", "num_groups epsilon delta "}};
  for (const auto& [name, inputs, any_layout] : operators()) {
    IPluginCreatorV3One* creator = library.creator(name);
    const std::string expected = all_expected[name];  // none for the others
    CHECK(field_names(creator->getFieldNames()) == expected, "%s has the fields %s", name.c_str(),
          field_names(creator->getFieldNames()).c_str());

    // Create a plugin, copy it, serialize the copy's fields, create another from them: each after the previous one is gone.
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

  // Fields of other types and lengths; Python creates those of 64 bits.
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
  for (const auto& [name, count, any_layout] : operators()) {
    const PluginPointer plugin = make(library.creator(name), fields.collection);
    IPluginV3OneBuild* const builder = build(plugin);
    CHECK(builder->getNbOutputs() == 1 && builder->getNbTactics() == 0, "%s", name.c_str());
    std::vector<DataType> types(size_t(count), DataType::kFLOAT);
    types[0] = DataType::kBF16;
    DataType output;
    CHECK(builder->getOutputDataTypes(&output, 1, types.data(), count) == 0 && output == DataType::kBF16, "%s", name.c_str());
    CHECK(builder->getOutputDataTypes(&output, 1, types.data(), count - 1) != 0, "%s", name.c_str());
    std::vector<DynamicPluginTensorDesc> in{size_t(count)}, out{1};
    CHECK(builder->getWorkspaceSize(in.data(), count, out.data(), 1) == 0, "%s", name.c_str());
    CHECK(builder->configurePlugin(in.data(), count - 1, out.data(), 1) != 0, "%s", name.c_str());
  }
}

// Every combination of X's type and format that a builder finds when it asks for one tensor after another.
std::set<std::pair<DataType, TensorFormat>> combinations(IPluginV3OneBuild* plugin, const OperatorFacts& facts, int rank) {
  constexpr int formats = 13;
  const DataType types[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT8, DataType::kINT32};
  const int count = facts.inputs;
  std::set<std::pair<DataType, TensorFormat>> found;  // of X; the others follow from it
  std::vector<DynamicPluginTensorDesc> tensors{size_t(count + 1)};
  for (DynamicPluginTensorDesc& tensor : tensors) tensor.desc.dims.nbDims = rank;
  const std::function<void(int)> go = [&](int position) {
    if (position > count) {
      const PluginTensorDesc &y = tensors[size_t(count)].desc, &x = tensors[0].desc;
      CHECK(y.type == x.type && y.format == x.format, "%s: Y is not like X", facts.name.c_str());
      CHECK(found.emplace(x.type, x.format).second, "%s: two combinations have one format of X", facts.name.c_str());
      return;
    }
    for (const DataType type : types)
      for (int format = 0; format < formats; ++format) {
        tensors[size_t(position)].desc.type = type;
        tensors[size_t(position)].desc.format = TensorFormat(format);
        if (plugin->supportsFormatCombination(position, tensors.data(), count, 1)) go(position + 1);
        tensors[size_t(position)].desc.type = type;
      }
  };
  go(0);
  CHECK(int(found.size()) <= plugin->getFormatCombinationLimit(), "%s", facts.name.c_str());
  return found;
}

// `wanted` returns the formats of a type and rank, for the plugins that take more than kLINEAR.
template <class Wanted>
void test_formats(const Library& library, Wanted wanted) {
  Fields fields;
  for (const OperatorFacts& facts : operators()) {
    const PluginPointer plugin = make(library.creator(facts.name), fields.collection);
    for (const int rank : {2, 3, 4, 5, 6}) {
      std::set<std::pair<DataType, TensorFormat>> expected;
      for (const DataType type : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16})
        for (const TensorFormat format : facts.any_layout ? wanted(type, rank) : std::vector{TensorFormat::kLINEAR})
          expected.emplace(type, format);
      CHECK(combinations(build(plugin), facts, rank) == expected, "%s, rank %d", facts.name.c_str(), rank);
    }
  }
}

// In a process that has TensorRT-RTX, whose builder takes the first format, plugins offer the one that saves
// transpositions. If TensorRT is loaded too, they offer all formats, because either may be the builder.
void test_formats_by_runtime(const Library& library) {
  test_formats(library, formats_of);
  const auto one = [](DataType type, int rank) {
    const bool last = rank == 4 && type != DataType::kBF16;
    return std::vector{last ? TensorFormat::kHWC : TensorFormat::kLINEAR};
  };
  void* const rtx = open_library(NNORM_MOCKS "libtensorrt_rtx.so.1");
  test_formats(library, one);
  void* const both = open_library(NNORM_MOCKS "libnvinfer.so.11");
  test_formats(library, formats_of);
  if (CHECK(rtx != nullptr && both != nullptr, "a mock is missing")) {
    dlclose(both);
    test_formats(library, one);
    dlclose(rtx);
  }
  test_formats(library, formats_of);
}

// An invalid shape is refused as soon as it is known: by getOutputShapes() while the network is parsed, else by
// configurePlugin() before the network is built.
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
    const std::vector<OperatorFacts> all = operators();
    const auto facts = std::find_if(all.begin(), all.end(), [&](const OperatorFacts& one) { return one.name == c.name; });
    if (!CHECK(facts != all.end(), "%s", c.name)) continue;
    const int count = facts->inputs;
    std::vector<Shape> shapes(size_t(count), c.parameters);
    shapes[0] = c.x;
    if (!c.operand.empty()) shapes.back() = c.operand;
    Fields fields;
    const PluginPointer plugin = make(library.creator(c.name), fields.collection);

    const auto parse = [&] {
      std::vector<Expressions> expressions(shapes.begin(), shapes.end());
      std::vector<DimsExprs> inputs;
      for (const Expressions& expression : expressions) inputs.push_back(expression.dims());
      DimsExprs y{};
      alignas(16) char no_builder[64] = {};  // a shape of the plugin's own is never computed
      const bool accepted = build(plugin)->getOutputShapes(inputs.data(), count, nullptr, 0, &y, 1,
                                                           *reinterpret_cast<IExprBuilder*>(no_builder)) == 0;
      CHECK(y.nbDims == inputs[0].nbDims && std::equal(y.d, y.d + y.nbDims, inputs[0].d), "%s", c.name);
      return accepted;
    };
    CHECK(parse() == c.good, "%s", c.name);
    shapes[0][0] = -1;
    CHECK(parse(), "%s: refused before the batch is known", c.name);
    shapes[0] = c.x;

    std::vector<PluginTensorDesc> inputs;
    for (const Shape& shape : shapes) inputs.push_back(description(shape, DataType::kFLOAT, TensorFormat::kLINEAR));
    CHECK((runtime(plugin)->onShapeChange(inputs.data(), count, inputs.data(), 1) == 0) == c.good, "%s", c.name);
    CHECK(runtime(plugin)->onShapeChange(inputs.data(), count - 1, inputs.data(), 1) != 0, "%s", c.name);

    // Each bound alone; the other two have unknown shapes.
    for (const auto bound : {&DynamicPluginTensorDesc::min, &DynamicPluginTensorDesc::opt, &DynamicPluginTensorDesc::max}) {
      std::vector<DynamicPluginTensorDesc> in{size_t(count)};
      for (size_t i = 0; i < in.size(); ++i) {
        in[i].desc = inputs[i];
        in[i].min = in[i].opt = in[i].max = dims(Shape(shapes[i].size(), -1));
        in[i].*bound = inputs[i].dims;
      }
      CHECK((build(plugin)->configurePlugin(in.data(), count, in.data(), 1) == 0) == c.good, "%s", c.name);
    }
  }

  // Attributes that must be refused.
  for (const char* name : {"LayerNormalNorm", "GroupNormalNorm"})
    for (const auto invalidate : {+[](Fields& fields) { fields.epsilon = -1; }, +[](Fields& fields) { fields.delta = -1; },
                             +[](Fields& fields) { fields.num_groups = 0; }}) {
      Fields fields;
      invalidate(fields);
      const bool known = fields.num_groups != 0 || std::strcmp(name, "GroupNormalNorm") == 0;
      CHECK((make(library.creator(name), fields.collection) == nullptr) == known, "%s", name);
    }
}

void test_environment(const Library& library) {
  Fields fields;
  for (const auto& [value, known] : {std::pair<const char*, bool>{"", true}, {"0", true}, {"1", true}, {"maybe", false}}) {
    const Environment environment(nnorm::same_bits_variable, value);
    for (const char* name : {"BatchNormalNorm", "LayerNormalNorm"})
      CHECK((make(library.creator(name), fields.collection) != nullptr) == known, "%s: %s is \"%s\"", name,
            nnorm::same_bits_variable, value);
  }
}

#if defined(NNORM_PLUGINS_FOR_GPU)
// Without a GPU, enqueue() of the released library returns an error. Machines with a driver skip this test.
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
#endif

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
  test_formats_by_runtime(library);
  test_shapes(library);
  test_environment(library);
  test_enqueue<float>(library);
  test_enqueue<nnorm::Float16>(library);
  test_enqueue<nnorm::BFloat16>(library);
#if defined(NNORM_PLUGINS_FOR_GPU)
  test_without_gpu(NNORM_PLUGINS_FOR_GPU);
#endif
  return finish();
}
