// Defines the only function that the CPU library calls in this library.
#include <memory>
#include <mutex>
#include <vector>

#include "../cuda_interface.h"
#include "../operator.h"
#include "nnorm/exported.h"
#include "nnorm/same_bits.h"

extern "C" NNORM_EXPORTED OrtStatus* nnorm_add_cuda_operators_1(
    const OrtApi* api, uint32_t version, OrtCustomOpDomain* domain) noexcept {
  using namespace nnorm::ort;
  return guarded(api, "nnorm, CUDA", [&] {
    refuse(nnorm::same_bits_refusal());
    static std::mutex mutex;
    static auto& made = *new std::vector<std::unique_ptr<Operators>>();  // for each ONNX Runtime of the process
    const std::lock_guard<std::mutex> lock(mutex);
    // The provider that is built into onnxruntime-gpu, and its successor in a library of its own, which had another name
    // in its first versions (https://github.com/microsoft/onnxruntime/pull/29544).
    for (const char* provider : {"CUDAExecutionProvider", "CudaPluginExecutionProvider"}) {
      made.push_back(std::make_unique<Operators>(api, version, provider));
      made.back()->add_all();
      made.back()->add_to(domain);
    }
  });
}
