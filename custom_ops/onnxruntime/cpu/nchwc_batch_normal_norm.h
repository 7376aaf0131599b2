// BatchNormalNorm and its epilogues in ONNX Runtime's blocked layout of [N, C, *spatial], which ONNX Runtime has only
// for float32 on CPUs.
#pragma once

#include "../operator.h"

namespace nnorm::ort {

// Adds NchwcBatchNormalNorm and its epilogues. X has the shape [N, C, *spatial], and is [N, C/block, *spatial, block]
// in memory. `block` is an attribute of the node.
void add_nchwc_operators(Operators& operators);

}  // namespace nnorm::ort
