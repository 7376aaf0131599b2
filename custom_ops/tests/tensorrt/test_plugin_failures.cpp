// Failures in the plugins: every allocation in turn, arguments that TensorRT should not pass, launches that CUDA
// refuses. Each function must return its error, leak nothing, and work again afterwards.
//
// The plugins are linked, so that their allocations are this program's.
#include <cmath>

#include "failing/failing.h"
#include "tensorrt/plugin_host.h"

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);

namespace nnorm_test {
namespace {

IPluginCreatorV3One* creator(const std::string& name) {
  int32_t count = 0;
  IPluginCreatorInterface* const* const creators = getCreators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* const one = static_cast<IPluginCreatorV3One*>(creators[i]);
    if (name == one->getPluginName()) return one;
  }
  return nullptr;
}

// Calls f() with its first allocation failing, then its second, and so on, until none fails. f returns whether it succeeded.
template <class F>
void with_failing_allocations(const char* what, F f) {
  bool failed = true;
  long n = 0;
  while (failed && n < 1000) {
    failing_allocation = ++n;
    bool succeeded;
    {
      const Inside inside;
      succeeded = f();
    }
    failed = stop_failing();
    CHECK(succeeded != failed, "%s, allocation %ld", what, n);
  }
  CHECK(n > 1, "%s allocates nothing", what);
}

void test_creators() {
  with_failing_allocations("getCreators", [] {
    int32_t count = -1;
    IPluginCreatorInterface* const* const creators = getCreators(count);
    return creators != nullptr && count > 0;
  });
}

void test_creation(const OperatorFacts& facts) {
  const Fields fields;
  IPluginCreatorV3One* const one = creator(facts.name);
  with_failing_allocations("createPlugin", [&] { return make(one, fields.collection) != nullptr; });
  const PluginPointer plugin = make(one, fields.collection);
  with_failing_allocations("clone", [&] { return PluginPointer(plugin->clone()) != nullptr; });
  CHECK(plugin->getCapabilityInterface(PluginCapabilityType(99)) == nullptr, "%s: an unknown capability", facts.name.c_str());
  CHECK(PluginPointer(one->createPlugin("node", nullptr, TensorRTPhase::kBUILD)) != nullptr, "%s without fields", facts.name.c_str());
  const PluginField nameless(nullptr, nullptr, PluginFieldType::kINT32, 1);
  CHECK(make(one, {1, &nameless}) != nullptr, "%s: a field without a name", facts.name.c_str());
}

// Numbers of inputs and outputs that the operator does not have.
void test_counts(const OperatorFacts& facts) {
  const Fields fields;
  const char* const name = facts.name.c_str();
  const PluginPointer plugin = make(creator(facts.name), fields.collection);
  IPluginV3OneBuild* const builder = build(plugin);
  const int32_t right = facts.inputs;
  std::vector<DynamicPluginTensorDesc> tensors(size_t(right) + 2);
  for (DynamicPluginTensorDesc& tensor : tensors) {
    tensor.desc.type = DataType::kFLOAT;
    tensor.desc.format = TensorFormat::kLINEAR;
    tensor.desc.dims.nbDims = 3;
  }
  std::vector<DataType> types(tensors.size(), DataType::kFLOAT);
  std::vector<DimsExprs> shapes(tensors.size());
  DataType type;
  DimsExprs shape{};
  alignas(16) char unread[64] = {};
  auto& expressions = *reinterpret_cast<IExprBuilder*>(unread);
  for (const auto& [inputs, outputs] : {std::pair<int32_t, int32_t>{right, 1}, {right - 1, 1}, {right + 1, 1}, {right, 0}, {right, 2}}) {
    const bool good = inputs == right && outputs == 1;
    CHECK((builder->getOutputDataTypes(&type, outputs, types.data(), inputs) == 0) == good, "%s: %d, %d", name, inputs, outputs);
    CHECK(good || builder->getOutputShapes(shapes.data(), inputs, nullptr, 0, &shape, outputs, expressions) != 0, "%s: %d, %d",
          name, inputs, outputs);
    CHECK(good || builder->configurePlugin(tensors.data(), inputs, tensors.data(), outputs) != 0, "%s: %d, %d", name, inputs, outputs);
    for (int32_t position = -1; position <= right + 1; ++position)
      CHECK(builder->supportsFormatCombination(position, tensors.data(), inputs, outputs) == (good && position >= 0 && position <= right),
            "%s: %d, %d, position %d", name, inputs, outputs, position);
  }
  with_failing_allocations("getOutputDataTypes", [&] {
    builder->getOutputDataTypes(&type, 2, types.data(), right);  // fails in any case, but must return
    return !made_to_fail;
  });
}

// X [2, 6, 4] and its parameters, or a size that the kernels do not take.
std::vector<PluginTensorDesc> inputs_of(const OperatorFacts& facts, int64_t extent) {
  const std::vector<int64_t> x{2, 6, extent};
  std::vector<PluginTensorDesc> inputs{description(x, DataType::kFLOAT, TensorFormat::kLINEAR)};
  for (int i = 1; i < facts.inputs; ++i)
    inputs.push_back(description({facts.name == "LayerNormalNorm" ? extent : 6}, DataType::kFLOAT, TensorFormat::kLINEAR));
  if (facts.inputs == 8) inputs.back() = inputs.front();
  return inputs;
}

void test_runs(const OperatorFacts& facts) {
  const Fields fields;
  const char* const name = facts.name.c_str();
  const PluginPointer plugin = make(creator(facts.name), fields.collection);
  IPluginV3OneRuntime* const running = runtime(plugin);
  std::vector<PluginTensorDesc> inputs = inputs_of(facts, 4);
  const int32_t count = int32_t(inputs.size());
  std::vector<float> numbers(48, 1.0f), y(48);
  const std::vector<const void*> data(inputs.size(), numbers.data());
  void* outputs[] = {y.data()};
  const auto enqueue = [&] { return running->enqueue(inputs.data(), inputs.data(), data.data(), outputs, nullptr, nullptr) == 0; };
  with_failing_allocations("onShapeChange", [&] { return running->onShapeChange(inputs.data(), count, inputs.data(), 1) == 0; });
  CHECK(enqueue(), "%s", name);
  for (long n = 1; n < 4; ++n) {  // later allocations belong to the emulated GPU
    failing_allocation = n;
    bool succeeded;
    {
      const Inside inside;
      succeeded = enqueue();
    }
    CHECK(stop_failing() && !succeeded, "%s: enqueue, allocation %ld", name, n);
  }
  CHECK(enqueue(), "%s", name);
  inputs[0].type = DataType::kINT8;
  CHECK(!enqueue(), "%s: INT8", name);
  inputs[0].type = DataType::kFLOAT;
  inputs[0].format = TensorFormat::kHWC8;
  CHECK(!enqueue(), "%s: HWC8 of float32", name);
  inputs = inputs_of(facts, int64_t(1) << 31);
  CHECK(!enqueue(), "%s: 2^31 elements in a row", name);

  inputs = inputs_of(facts, 4);
  inputs[1].dims.d[0] += 1;
  CHECK(running->onShapeChange(inputs.data(), count, inputs.data(), 1) != 0, "%s: another weight", name);
}

// Attributes that must be refused.
void test_attributes() {
  Fields fields;
  for (const float bad : {-1e-5f, -0x1p-149f, NAN, INFINITY, -INFINITY})
    for (float* const attribute : {&fields.epsilon, &fields.delta}) {
      const float usual = *attribute;
      *attribute = bad;
      for (const char* name : {"LayerNormalNorm", "GroupNormalNorm"})
        CHECK(make(creator(name), fields.collection) == nullptr, "%s: %g", name, double(bad));
      *attribute = usual;
    }
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  test_creators();
  for (const OperatorFacts& facts : operators()) {
    test_creation(facts);
    test_counts(facts);
    test_runs(facts);
  }
  test_attributes();
  return finish();
}
