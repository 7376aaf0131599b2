// Declares the function that instruction_set.cpp defines for each instruction set.
#pragma once

#include "nnorm/kernels.h"

#define NNORM_KERNELS_OF(instruction_set) kernels_for_##instruction_set
#define NNORM_KERNELS(instruction_set) NNORM_KERNELS_OF(instruction_set)

namespace nnorm {

const InstructionSet* kernels_for_avx512();
const InstructionSet* kernels_for_avx2();
const InstructionSet* kernels_for_neon();
const InstructionSet* kernels_for_baseline();

}  // namespace nnorm
