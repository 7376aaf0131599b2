// BatchNormalNorm and its epilogues on ONNX Runtime's blocked layout of [N, C, *spatial], which it has for float32 on
// processors alone.
#pragma once

#include "../operator.h"

namespace nnorm::ort {

// X in blocks of `block` channels: [N, C/block, *spatial, block] in memory, [N, C, *spatial] by its shape.
void nchwc_batch_normal_norm(const Run& run, Epilogue epilogue, int64_t block);

int64_t nchwc_block(const Attributes& attributes);

template <Epilogue epilogue>
struct NchwcBatchNormalNormWith {
  static constexpr size_t parameters = ChannelProblem<float>::parameter_count;
  static constexpr size_t operands = epilogue == Epilogue::add_relu ? 1 : 0;
  explicit NchwcBatchNormalNormWith(const Attributes& attributes) : block(nchwc_block(attributes)) {}
  void operator()(const Run& run) const { nchwc_batch_normal_norm(run, epilogue, block); }
  int64_t block;
};

template <class T>
struct NchwcBatchNormalNorm : NchwcBatchNormalNormWith<Epilogue::none> {
  static constexpr const char* name = "NchwcBatchNormalNorm";
  using NchwcBatchNormalNormWith::NchwcBatchNormalNormWith;
};

template <class T>
struct NchwcBatchNormalNormRelu : NchwcBatchNormalNormWith<Epilogue::relu> {
  static constexpr const char* name = "NchwcBatchNormalNormRelu";
  using NchwcBatchNormalNormWith::NchwcBatchNormalNormWith;
};

template <class T>
struct NchwcBatchNormalNormAddRelu : NchwcBatchNormalNormWith<Epilogue::add_relu> {
  static constexpr const char* name = "NchwcBatchNormalNormAddRelu";
  using NchwcBatchNormalNormWith::NchwcBatchNormalNormWith;
};

}  // namespace nnorm::ort
