// RegisterCustomOps, the one function that ONNX Runtime looks for in this library, and the table of what it registers.
#include <cstdio>
#include <memory>
#include <mutex>
#include <vector>

#include "batch_normal_norm.h"
#include "normal_norm_rows.h"

namespace nnorm::ort {
namespace {

constexpr uint32_t oldest_api = 18;  // ONNX Runtime 1.16 ignores CreateKernelV2, 1.17 knows no in-place operators

// The operators of one ONNX Runtime. They must outlive every session, so they are never destroyed.
struct Domain {
  const OrtApi* api;
  uint32_t version;
  std::vector<std::unique_ptr<CustomOp>> ops;
  OrtCustomOpDomain* domain = nullptr;

  Domain(const OrtApi* api_, uint32_t version_) : api(api_), version(version_) {
    add_all_types<BatchNormalNorm>();
    add_all_types<BatchNormalNormRelu>();
    add_all_types<BatchNormalNormAddRelu>();
    add_all_types<LayerNormalNorm>();
    add_all_types<GroupNormalNorm>();
    add<NchwcBatchNormalNorm, float>();  // ONNX Runtime has this layout for float32 alone
    add<NchwcBatchNormalNormRelu, float>();
    add<NchwcBatchNormalNormAddRelu, float>();
    check(api, api->CreateCustomOpDomain("nnorm", &domain));
    for (const auto& op : ops) check(api, api->CustomOpDomain_Add(domain, op.get()));
  }

  template <template <class> class Operator, class T>
  void add() {
    ops.push_back(custom_op<Operator, T>(api, version));
  }

  template <template <class> class Operator>
  void add_all_types() {
    add<Operator, float>();
    add<Operator, double>();
    add<Operator, Float16>();
    add<Operator, BFloat16>();
  }
};

// A process may have loaded several copies of ONNX Runtime, each with an API of its own.
OrtCustomOpDomain* domain_of(const OrtApi* api, uint32_t version) {
  static std::mutex mutex;
  static auto& domains = *new std::vector<std::unique_ptr<Domain>>();
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& known : domains)
    if (known->api == api) return known->domain;
  domains.push_back(std::make_unique<Domain>(api, version));
  return domains.back()->domain;
}

// ONNX Runtime's API level is its minor version, as long as its major one is 1.
uint32_t api_level(const char* version) {
  unsigned major = 0, minor = 0;
  if (std::sscanf(version, "%u.%u", &major, &minor) != 2) return 0;
  return major == 1 ? minor : ORT_API_VERSION;
}

}  // namespace
}  // namespace nnorm::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL
RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) noexcept {
  using namespace nnorm::ort;
  const char* runtime = base->GetVersionString();
  const uint32_t level = api_level(runtime);
  if (level < oldest_api) {
    const OrtApi* oldest = base->GetApi(1);
    const std::string message = std::string("nnorm: ONNX Runtime 1.18 or newer is needed, this is ") + runtime;
    return oldest->CreateStatus(ORT_FAIL, message.c_str());
  }
  const uint32_t version = level < ORT_API_VERSION ? level : ORT_API_VERSION;
  const OrtApi* api = base->GetApi(version);
  return guarded(api, "nnorm", [&] { check(api, api->AddCustomOpDomain(options, domain_of(api, version))); });
}
