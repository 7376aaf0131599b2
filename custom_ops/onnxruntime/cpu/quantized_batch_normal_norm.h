// BatchNormalNorm and its epilogues between quantized tensors, on CPUs.
#pragma once

#include "../operator.h"

namespace nnorm::ort {

// Adds QuantizedBatchNormalNorm and its epilogues, for uint8 and int8 tensors in every combination.
void add_quantized_operators(Operators& operators);

}  // namespace nnorm::ort
