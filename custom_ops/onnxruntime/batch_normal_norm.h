// BatchNormalNorm and its epilogues, on tensors [N, C, *spatial] and on ONNX Runtime's blocked layout of them.
#pragma once

#include "operator.h"

namespace nnorm::ort {

template <class T>
void batch_normal_norm(const Run& run, Epilogue epilogue);

// X in blocks of `block` channels: [N, C/block, *spatial, block] in memory, [N, C, *spatial] by its shape.
void nchwc_batch_normal_norm(const Run& run, Epilogue epilogue, int64_t block);

int64_t nchwc_block(const Attributes& attributes);

// One operator of the family, in either layout.
#define NNORM_BATCH_NORMAL_NORM(type, epilogue_, operands_)                                           \
  template <class T>                                                                                  \
  struct type {                                                                                       \
    static constexpr const char* name = #type;                                                        \
    static constexpr size_t parameters = 6, operands = operands_;                                     \
    explicit type(const Attributes&) {}                                                               \
    void operator()(const Run& run) const { batch_normal_norm<T>(run, Epilogue::epilogue_); }         \
  };                                                                                                  \
  template <class T>                                                                                  \
  struct Nchwc##type {                                                                                \
    static constexpr const char* name = "Nchwc" #type;                                                \
    static constexpr size_t parameters = 6, operands = operands_;                                     \
    explicit Nchwc##type(const Attributes& attributes) : block(nchwc_block(attributes)) {}            \
    void operator()(const Run& run) const { nchwc_batch_normal_norm(run, Epilogue::epilogue_, block); } \
    int64_t block;                                                                                    \
  };

NNORM_BATCH_NORMAL_NORM(BatchNormalNorm, none, 0)
NNORM_BATCH_NORMAL_NORM(BatchNormalNormRelu, relu, 0)
NNORM_BATCH_NORMAL_NORM(BatchNormalNormAddRelu, add_relu, 1)

#undef NNORM_BATCH_NORMAL_NORM

}  // namespace nnorm::ort
