// The CUDA kernels are in a separate library, so that the CPU library never needs CUDA.
#pragma once

#include "../runtime.h"

namespace nnorm::ort {

// Adds the operators of the CUDA library to the domain if the library is in this library's folder. Operators of a
// provider that an ONNX Runtime lacks do no harm, and a program may load a provider after the registration. Throws Error
// if the library exists but cannot be used.
void add_cuda_operators(const OrtApi* api, uint32_t version, OrtCustomOpDomain* domain);

}  // namespace nnorm::ort
