// The function that target.cpp defines, for each instruction set that it may be compiled for.
#pragma once

#include "nnorm/kernels.h"

#define NNORM_TARGET_FUNCTION_OF(target) kernels_for_##target
#define NNORM_TARGET_FUNCTION(target) NNORM_TARGET_FUNCTION_OF(target)

namespace nnorm {

const Target* kernels_for_avx512();
const Target* kernels_for_avx2();
const Target* kernels_for_neon();
const Target* kernels_for_baseline();

}  // namespace nnorm
