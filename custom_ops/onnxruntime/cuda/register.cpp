// Defines the only function that the CPU library calls in this library.
#include <memory>
#include <mutex>
#include <vector>

#include "../cuda_interface.h"
#include "../operator.h"
#include "nnorm/same_bits.h"

extern "C" __attribute__((visibility("default"))) OrtStatus* nnorm_add_cuda_operators_1(
    const OrtApi* api, uint32_t version, OrtCustomOpDomain* domain) noexcept {
  using namespace nnorm::ort;
  return guarded(api, "nnorm, CUDA", [&] {
    refuse(nnorm::same_bits_refusal());
    static std::mutex mutex;
    static auto& made = *new std::vector<std::unique_ptr<Operators>>();  // one for each ONNX Runtime of the process
    const std::lock_guard<std::mutex> lock(mutex);
    made.push_back(std::make_unique<Operators>(api, version));
    made.back()->add_all();
    made.back()->add_to(domain);
  });
}
