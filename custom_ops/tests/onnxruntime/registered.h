// The library's operators as ONNX Runtime gets them from RegisterCustomOps.
#pragma once

#include "../check.h"
#include "../oracle.h"
#include "host.h"

extern "C" OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) noexcept;

namespace nnorm_test {
namespace {

// What the tests need to know of an operator.
struct Operator {
  const OrtCustomOp* op;
  std::string name, plain_name;
  ONNXTensorElementDataType type;
  bool blocked, per_channel, frozen, takes_residual;
  size_t inputs;
  nnorm::Epilogue epilogue;
};

// The operators between quantized tensors, for test_quantized_operators.cpp and fuzz_quantized_operators.cpp.
bool is_quantized(const OrtCustomOp* op) { return std::strncmp(op->GetName(op), "Quantized", 9) == 0; }

// A CUDA library in the folder of the program adds its own operators.
bool is_on_cpu(const OrtCustomOp* op) { return std::strcmp(op->GetExecutionProviderType(op), "CPUExecutionProvider") == 0; }

[[maybe_unused]] std::vector<Operator> all_operators(const host::Domain& domain) {
  std::vector<Operator> all;
  for (const OrtCustomOp* op : domain.operators) {
    if (is_quantized(op) || !is_on_cpu(op)) continue;
    Operator found{op, op->GetName(op), op->GetName(op), op->GetOutputType(op, 0), false, true, false, false,
                   op->GetInputTypeCount(op), nnorm::Epilogue::none};
    found.blocked = found.name.rfind("Nchwc", 0) == 0;
    if (found.blocked) found.plain_name = found.name.substr(5);
    found.per_channel = found.name != "LayerNormalNorm";
    for (const nnorm::EpilogueFacts& facts : nnorm::epilogues)
      if (found.plain_name == facts.operator_name) {
        found.frozen = true;
        found.takes_residual = facts.takes_residual;
        found.epilogue = facts.epilogue;
      }
    all.push_back(found);
    CHECK(op->GetStartVersion(op) == 1 && op->GetEndVersion(op) == 1, "%s: versions that do not exist", found.name.c_str());
    CHECK(op->GetOutputTypeCount(op) == 1, "%s", found.name.c_str());
    for (size_t i = 0; i < found.inputs; ++i) {
      const bool wide = i > 0 && !(found.takes_residual && i + 1 == found.inputs);
      const auto expected_type = !wide ? found.type
                                 : found.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE ? ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE
                                                                                      : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
      CHECK(op->GetInputType(op, i) == expected_type && op->GetInputCharacteristic(op, i) == INPUT_OUTPUT_REQUIRED &&
                op->GetInputMemoryType(op, i) == OrtMemTypeDefault,
            "%s: input %zu", found.name.c_str(), i);
    }
    CHECK(op->GetOutputCharacteristic(op, 0) == INPUT_OUTPUT_REQUIRED, "%s", found.name.c_str());
  }
  return all;
}

// Registers the library with the ONNX Runtime of this API. Returns its domain, or nullptr and the reason.
const host::Domain* registered(const OrtApi* api, std::string& reason) {
  host::current_api = api;
  host::Domain* domain = nullptr;
  OrtStatus* status;
  {
    const Inside inside;
    status = RegisterCustomOps(reinterpret_cast<OrtSessionOptions*>(&domain), &host::base);
  }
  reason = status == nullptr ? "" : api->GetErrorMessage(status);
  if (status != nullptr) api->ReleaseStatus(status);
  return domain;
}

// Runs a node while a call of the API or an allocation is made to fail: it must return an error, and leak no object of
// the host. Returns whether the failure occurred.
template <class RunNode>
[[maybe_unused]] bool fails_on_the_way(Random& random, const std::string& node, RunNode run) {
  const long live = host::live_statuses + host::live_infos;
  (random.below(2) ? host::failing_call : failing_allocation) = 1 + long(random.below(random.below(2) ? 8 : 40));
  const std::string reason = run();
  const bool failed = host::stop_failing();
  CHECK(!failed || !reason.empty(), "%s: a failure became a result", node.c_str());
  CHECK(host::live_statuses + host::live_infos == live, "%s: an object of the host is lost", node.c_str());
  return failed;
}

[[maybe_unused]] void check_that_nothing_is_lost() {
  CHECK(host::live_statuses == 0 && host::live_infos == 0, "%ld statuses and %ld infos are lost", host::live_statuses,
        host::live_infos);
}

// Runs a node while the first call of the API is made to fail, then the second, and so on until none fails, and the
// same for allocations. Each failure must give an error, and no failure a result. Returns the number of failures.
template <class RunNode>
[[maybe_unused]] long fail_in_turn(const char* node, RunNode run) {
  long failures = 0;
  for (long* const failing : {&host::failing_call, &failing_allocation}) {
    bool failed = true;
    for (long n = 1; failed && n < 1000; ++n) {
      *failing = n;
      const std::string reason = run();
      failed = host::stop_failing();
      failures += failed;
      CHECK(failed == !reason.empty(), "%s, failure %ld: %s", node, n, reason.c_str());
    }
  }
  return failures;
}

// The main() of a test: test(domain) gets the library's operators.
template <class Test>
[[maybe_unused]] int with_operators(Test test) {
  static const OrtApi api = host::make_api();
  std::string reason;
  const host::Domain* const domain = registered(&api, reason);
  if (!CHECK(domain != nullptr && reason.empty(), "registration: %s", reason.c_str())) return finish();
  test(*domain);
  check_that_nothing_is_lost();
  return finish();
}

// The main() of a fuzzer: PROGRAM [CASES [SEED]]. draw(domain, cases, random) runs the cases and prints their figures.
template <class Draw>
[[maybe_unused]] int fuzz(int count, char** arguments, Draw draw) {
  const long cases = count > 1 ? std::atol(arguments[1]) : 20000;
  Random random(count > 2 ? unsigned(std::atol(arguments[2])) : 1);
  return with_operators([&](const host::Domain& domain) { draw(domain, cases, random); });
}

}  // namespace
}  // namespace nnorm_test
