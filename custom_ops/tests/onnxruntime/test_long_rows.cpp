// Computes a row that the threads of a session share, called as ONNX Runtime does: four phases over its parts, the bits
// of one thread, and every call of the API and every allocation failing in turn.
#include <thread>

#include "../rows.h"
#include "registered.h"

namespace nnorm_test {
namespace {

constexpr size_t length = nnorm::shortest_shared_row + 77;

// The message of the error; empty if y was computed.
std::string run(const OrtCustomOp* op, Rows<float>& rows, std::vector<float>& y) {
  host::Node node{{"axis", int64_t(-1)}, {"epsilon", float(rows.epsilon)}, {"delta", float(rows.delta)}};
  const int64_t n = int64_t(length);
  host::Context context{{{{1, n}, rows.x.data()}, {{n}, rows.weight.data()}, {{n}, rows.bias.data()}}, {{}, y.data()}, SIZE_MAX};
  void* state = nullptr;
  OrtStatus* status;
  {
    const Inside inside;
    status = op->CreateKernelV2(op, host::current_api, reinterpret_cast<const OrtKernelInfo*>(&node), &state);
    if (status == nullptr) status = op->KernelComputeV2(state, reinterpret_cast<OrtKernelContext*>(&context));
    if (state != nullptr) op->KernelDestroy(state);
  }
  if (status == nullptr) return "";
  const std::string message = host::current_api->GetErrorMessage(status);
  host::current_api->ReleaseStatus(status);
  return message.empty() ? "no message" : message;
}

void test_long_row(const OrtCustomOp* op) {
  Random random(1);
  Rows<float> rows({1, length, 1, 1}, normal_numbers(length, random), random);
  rows.epsilon = double(1e-5f), rows.delta = double(1e-3f);
  std::vector<float> expected(length), y(length);
  const RowProblem<float> alone = rows.work(rows.x.data(), expected.data());
  nnorm::best_instruction_set().table<float>().layer_group_normal_norm(alone, 0, 1);

  host::handed_out.clear();
  const std::string reason = run(op, rows, y);
  CHECK(reason.empty() && same_bits(y, expected), "a shared row: %s", reason.empty() ? "other bits than alone" : reason.c_str());
  const size_t parts = (length + nnorm::elements_per_part - 1) / nnorm::elements_per_part;
  const bool has_threads = std::thread::hardware_concurrency() > 1;
  CHECK(host::handed_out == std::vector<size_t>(has_threads ? 4 : 0, parts), "%zu calls hand out the parts of a row",
        host::handed_out.size());

  const long failures = fail_in_turn("a shared row", [&] { return run(op, rows, y); });
  CHECK(failures > (has_threads ? 8 : 4), "%ld failures", failures);
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  return with_operators([](const host::Domain& domain) {
    long found = 0;
    for (const Operator& each : all_operators(domain))
      if (each.name == "LayerNormalNorm" && each.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) test_long_row(each.op), ++found;
    CHECK(found == 1, "%ld operators LayerNormalNorm for float", found);
  });
}
