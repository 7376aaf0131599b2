// The library's registration and the callbacks that ONNX Runtime calls before a node runs, each with every call of the API
// and every allocation failing in turn.
#include <cstring>
#include <memory>

#include "../buffers.h"
#include "registered.h"

namespace nnorm_test {
namespace {

using nnorm::Shape;

// ONNX Runtime's callback for the name must not throw.
void check_names(const host::Domain& domain) {
  for (const OrtCustomOp* op : domain.operators) {
    failing_allocation = 1;
    {
      const Inside inside;
      op->GetName(op);
    }
    CHECK(!host::stop_failing(), "%s: the name is made after registration", op->GetName(op));
  }
}

// Registers with every version of ONNX Runtime, and with every call and allocation failing in turn.
void check_registration(const OrtApi& api) {
  std::string reason;
  for (const char* old : {"1.17.3", "0.9", "not a version", ""}) {
    host::version = old;
    CHECK(registered(&api, reason) == nullptr && reason.find("1.18") != std::string::npos, "%s: %s", old, reason.c_str());
  }
  host::version = "2.0.0";
  const OrtApi newer = api;
  CHECK(registered(&newer, reason) != nullptr, "2.0.0: %s", reason.c_str());
  host::version = "1.31.0";
  static std::vector<std::unique_ptr<OrtApi>> apis;  // the library may remember an API
  for (long* const failing : {&host::failing_call, &failing_allocation}) {
    bool failed = true;
    for (long n = 1; failed && n < 10000; ++n) {
      apis.push_back(std::make_unique<OrtApi>(api));
      const long statuses = host::live_statuses, domains = host::live_domains;
      *failing = n;
      registered(apis.back().get(), reason);
      failed = host::stop_failing();
      CHECK(failed != reason.empty(), "registration, failure %ld: %s", n, reason.c_str());
      CHECK(host::live_statuses == statuses, "registration, failure %ld: a status is lost", n);
      if (failed && failing == &failing_allocation)
        CHECK(host::live_domains == domains, "registration, failure %ld: a domain is lost", n);
      registered(apis.back().get(), reason);  // the process goes on
      CHECK(reason.empty(), "registration after failure %ld: %s", n, reason.c_str());
    }
  }
}

void check_inference(const Operator& operation) {
  struct {
    host::Info info;
    bool published;
  } const cases[] = {{{{2, 3}, {"", ""}}, true},     {{{-1, 3}, {"batch", ""}}, true}, {{{-1, 3}, {"", ""}}, false},
                     {{{-1, 3}, {}}, false},         {{{}, {}}, false},               {{{0, -1, -1}, {"", "a", "b"}}, true},
                     {{{0, -1, -1}, {"", "a", ""}}, false}};
  for (const auto& each : cases)
    for (long* const failing : {&host::failing_call, &failing_allocation})
      for (long n = 0; n < 8; ++n) {
        host::InferenceContext context{each.info};
        *failing = n;
        OrtStatus* status;
        {
          const Inside inside;
          status = operation.op->InferOutputShapeFn(operation.op, reinterpret_cast<OrtShapeInferContext*>(&context));
        }
        const bool failed = host::stop_failing();
        CHECK(failed == (status != nullptr), "%s: shape inference", operation.name.c_str());
        CHECK(failed || context.published == each.published, "%s: shape of rank %zu", operation.name.c_str(),
              each.info.shape.size());
        CHECK(!failed || !context.published, "%s: a failure published a shape", operation.name.c_str());
        if (status != nullptr) host::current_api->ReleaseStatus(status);
      }
}

void check_inplace(const Operator& operation) {
  for (long n = 0; n < 3; ++n) {
    int *inputs = nullptr, *outputs = nullptr;
    failing_allocation = n;
    size_t choices;
    {
      const Inside inside;
      choices = operation.op->GetMayInplace(&inputs, &outputs);
    }
    CHECK(host::stop_failing() == (n > 0), "%s: in place", operation.name.c_str());
    CHECK(choices == (n > 0 ? 0u : 1u + operation.takes_residual), "%s: %zu choices", operation.name.c_str(), choices);
    for (size_t i = 0; i < choices; ++i)
      CHECK(outputs[i] == 0 && inputs[i] == (i == 0 ? 0 : int(operation.inputs) - 1), "%s: choice %zu",
            operation.name.c_str(), i);
    operation.op->ReleaseMayInplace(inputs, outputs);
  }
}

// An input that the host does not have.
void check_missing_input(const Operator& operation) {
  void* state = nullptr;
  host::Node node;
  if (operation.blocked) node["block"] = int64_t(8);
  operation.op->CreateKernelV2(operation.op, host::current_api, reinterpret_cast<const OrtKernelInfo*>(&node), &state);
  host::Context context;
  context.inputs.assign(operation.inputs, {{2, 8, 3}, nullptr});
  OrtStatus* status = operation.op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));
  CHECK(status != nullptr && std::strstr(host::current_api->GetErrorMessage(status), "is missing"), "%s",
        operation.name.c_str());
  host::current_api->ReleaseStatus(status);
  operation.op->KernelDestroy(state);
}

// A node whose tensors hold one number, and whose parameters may be constants. No kernel repeats its parameters for
// this extent.
struct Node {
  static constexpr int64_t extent = 16;
  const Operator& operation;
  host::Node attributes;
  std::vector<double> memory = std::vector<double>(2 * 8 * extent, 1.0), y = std::vector<double>(memory.size());
  host::Context context{{}, {{}, y.data()}, SIZE_MAX};
  void* state = nullptr;

  explicit Node(const Operator& of) : operation(of) {
    if (operation.blocked) attributes["block"] = int64_t(8);
    const Shape parameter{operation.per_channel ? 8 : extent};
    for (size_t i = 0; i < operation.inputs; ++i)
      context.inputs.push_back({is_tensor(i) ? Shape{2, 8, extent} : parameter, memory.data()});
  }
  ~Node() { operation.op->KernelDestroy(state); }

  bool is_tensor(size_t input) const { return input == 0 || (operation.takes_residual && input + 1 == operation.inputs); }

  // Creates the kernel. Its parameters are constants in this memory, or computed if it is null.
  void create(void* constants, bool on_gpu = false) {
    const auto* const info = reinterpret_cast<const OrtKernelInfo*>(&attributes);
    for (size_t i = 0; constants != nullptr && i < operation.inputs; ++i)
      if (!is_tensor(i))
        host::constants[{info, i}] = {context.inputs[i].shape, constants, on_gpu, operation.op->GetInputType(operation.op, i)};
    CHECK(operation.op->CreateKernelV2(operation.op, host::current_api, info, &state) == nullptr, "%s", operation.name.c_str());
    host::constants.clear();
  }

  const std::vector<double>& run() {
    const Inside inside;
    OrtStatus* const status = operation.op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));
    CHECK(status == nullptr, "%s", operation.name.c_str());
    return y;
  }
};

// A run with constants reads X and the residual, gets the addresses of its parameters, and allocates memory only for
// shapes.
void check_cost_of_a_run(const Operator& operation) {
  Node node(operation);
  node.create(node.memory.data());
  node.run();
  constexpr long many = 1000;
  host::failing_call = failing_allocation = many;
  node.run();
  const long calls = many - host::failing_call, allocations = many - failing_allocation;
  const long tensors = 1 + operation.takes_residual;
  host::stop_failing();
  CHECK(calls == 5 * tensors + 2 * (long(operation.inputs) - tensors) + 2 && allocations == tensors,
        "%s: %ld calls, %ld allocations in a run", operation.name.c_str(), calls, allocations);
}

// ONNX Runtime may give a kernel constants of outer graphs that are not the parameters of a run, or that are in a GPU's
// memory.
void check_constants_that_are_not_the_parameters(const Operator& operation) {
  std::vector<double> others(2 * 8 * Node::extent, 2.0);
  Node computed(operation), of_others(operation), with_outer_constants(operation), on_gpu(operation);
  computed.create(nullptr);
  of_others.create(others.data());
  for (size_t i = 0; i < operation.inputs; ++i)
    if (!of_others.is_tensor(i)) of_others.context.inputs[i].data = others.data();
  with_outer_constants.create(others.data());
  on_gpu.create(reinterpret_cast<void*>(1), true);
  CHECK(!same_bits(computed.run(), of_others.run()), "%s: these parameters make no difference", operation.name.c_str());
  for (int run = 0; run < 2; ++run) {
    CHECK(same_bits(with_outer_constants.run(), computed.run()), "%s: constants of an outer graph", operation.name.c_str());
    CHECK(same_bits(on_gpu.run(), computed.run()), "%s: constants on a GPU", operation.name.c_str());
  }
  with_outer_constants.context.inputs = of_others.context.inputs;  // the first iteration of a loop may have the constants
  CHECK(same_bits(with_outer_constants.run(), of_others.y), "%s: constants that are the parameters", operation.name.c_str());
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  static const OrtApi api = host::make_api(), first = api;
  std::string refusal;
  if (const host::Domain* const domain = registered(&first, refusal)) check_names(*domain);
  check_registration(api);
  static const OrtApi used = host::make_api();
  std::string reason;
  const host::Domain* const domain = registered(&used, reason);
  if (!CHECK(domain != nullptr && reason.empty(), "registration: %s", reason.c_str())) return finish();
  CHECK(registered(&used, reason) == domain, "a second registration makes another domain");
  for (const Operator& operation : all_operators(*domain)) {
    check_inference(operation);
    check_inplace(operation);
    check_missing_input(operation);
    check_cost_of_a_run(operation);
    check_constants_that_are_not_the_parameters(operation);
  }
  CHECK(host::live_statuses == 0 && host::live_infos == 0, "%ld statuses and %ld infos are lost", host::live_statuses,
        host::live_infos);
  return finish();
}
