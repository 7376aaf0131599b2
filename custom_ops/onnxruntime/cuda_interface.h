// The interface between the CPU library, which owns the domain, and the CUDA library in the same folder.
#pragma once

#include <onnxruntime_c_api.h>

#define NNORM_CUDA_LIBRARY "libnnorm_ort_cuda.so"
#define NNORM_ADD_CUDA_OPERATORS "nnorm_add_cuda_operators_1"  // a new signature gets a new number

namespace nnorm::ort {

// Adds the CUDA library's operators, created for API level `version`, to the domain.
using AddCudaOperators = OrtStatus*(const OrtApi* api, uint32_t version, OrtCustomOpDomain* domain) noexcept;

}  // namespace nnorm::ort
