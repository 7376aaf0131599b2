// BatchNormalNorm and its epilogues on ONNX Runtime's blocked layout of [N, C, *spatial], which ONNX Runtime has for
// float32 on CPUs only.
#pragma once

#include "../operator.h"

namespace nnorm::ort {

// Adds NchwcBatchNormalNorm and its epilogues. Their X has blocks of `block` channels, an attribute of the node:
// [N, C/block, *spatial, block] in memory, and the shape [N, C, *spatial].
void add_nchwc_operators(Operators& operators);

}  // namespace nnorm::ort
