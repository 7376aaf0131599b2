// What the CPU library, which owns the domain, asks of the CUDA library beside it.
#pragma once

#include <onnxruntime_c_api.h>

#define NNORM_CUDA_LIBRARY "libnnorm_ort_cuda.so"
#define NNORM_ADD_CUDA_OPERATORS "nnorm_add_cuda_operators_1"  // another number where its signature is another

namespace nnorm::ort {

// Adds its operators, made for API level `version`, to the domain.
using AddCudaOperators = OrtStatus*(const OrtApi* api, uint32_t version, OrtCustomOpDomain* domain) noexcept;

}  // namespace nnorm::ort
