// The kernels for GPUs, in a library of their own so that this one never needs CUDA.
#pragma once

#include "../runtime.h"

namespace nnorm::ort {

// Adds the operators of the CUDA library in this library's folder to the domain, if it is there and this ONNX Runtime
// has a CUDA execution provider. Throws Error if it is there and cannot be used.
void add_cuda_operators(const OrtApi* api, uint32_t version, OrtCustomOpDomain* domain);

}  // namespace nnorm::ort
