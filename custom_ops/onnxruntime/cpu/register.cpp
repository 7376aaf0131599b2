// RegisterCustomOps, the only function that ONNX Runtime looks for in this library.
#include <cstdio>
#include <memory>
#include <mutex>
#include <vector>

#include "../operator.h"
#include "cuda_library.h"
#include "keep_loaded.h"
#include "nchwc_batch_normal_norm.h"
#include "nnorm/exported.h"
#include "quantized_batch_normal_norm.h"

namespace nnorm::ort {
namespace {

constexpr uint32_t oldest_api = 18;  // ONNX Runtime 1.16 ignores CreateKernelV2, 1.17 has no in-place custom operators

// The domain that was created for one ONNX Runtime. A session accepts a domain from one owner only, so it also has the
// operators that the CUDA library creates.
struct Domain {
  const OrtApi* api;
  Operators operators;
  Owner<OrtCustomOpDomain> domain;

  Domain(const OrtApi* api_, uint32_t version)
      : api(api_), operators(api_, version, "CPUExecutionProvider"), domain(nullptr, api_->ReleaseCustomOpDomain) {
    operators.add_all();
    add_nchwc_operators(operators);
    add_quantized_operators(operators);
    OrtCustomOpDomain* created = nullptr;
    check(api, api->CreateCustomOpDomain("nnorm", &created));
    domain.reset(created);
    operators.add_to(created);
    add_cuda_operators(api, version, created);
  }
};

// A process may have loaded several copies of ONNX Runtime, each with its own API.
OrtCustomOpDomain* domain_of(const OrtApi* api, uint32_t version) {
  static std::mutex mutex;
  static auto& domains = *new std::vector<std::unique_ptr<Domain>>();
  keep_loaded();
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& known : domains)
    if (known->api == api) return known->domain.get();
  domains.push_back(std::make_unique<Domain>(api, version));
  return domains.back()->domain.get();
}

// ONNX Runtime's API level: its minor version while its major version is 1; 0 if the version cannot be read.
uint32_t api_level(const char* version) {
  unsigned major = 0, minor = 0;
  if (std::sscanf(version, "%u.%u", &major, &minor) != 2 || major == 0) return 0;
  return major == 1 ? minor : ORT_API_VERSION;
}

}  // namespace
}  // namespace nnorm::ort

extern "C" NNORM_EXPORTED OrtStatus* ORT_API_CALL
RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) noexcept {
  using namespace nnorm::ort;
  const char* runtime = base->GetVersionString();
  const uint32_t level = api_level(runtime);
  if (level < oldest_api) {
    return guarded(base->GetApi(1), "nnorm", [&] {
      throw Error{ORT_FAIL, std::string("ONNX Runtime 1.18 or newer is needed, this is ") + runtime +
                                "; update the package onnxruntime"};
    });
  }
  const uint32_t version = level < ORT_API_VERSION ? level : ORT_API_VERSION;
  const OrtApi* api = base->GetApi(version);
  return guarded(api, "nnorm", [&] { check(api, api->AddCustomOpDomain(options, domain_of(api, version))); });
}
