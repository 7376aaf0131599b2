// BatchNormalNorm and its epilogues, on tensors [N, C, *spatial].
#pragma once

#include "operator.h"

namespace nnorm::ort {

// What a node asks for, its inputs checked, but for y; `shape` becomes X's.
template <class T>
ChannelProblem<T> channel_problem(const Run& run, Epilogue epilogue, Shape& shape);

template <class T>
void batch_normal_norm(const Run& run, Epilogue epilogue);

template <class T, Epilogue epilogue>
struct BatchNormalNormWith {
  static constexpr size_t parameters = ChannelProblem<T>::parameter_count;
  static constexpr size_t operands = epilogue == Epilogue::add_relu ? 1 : 0;
  explicit BatchNormalNormWith(const Attributes&) {}
  void operator()(const Run& run) const { batch_normal_norm<T>(run, epilogue); }
};

template <class T>
struct BatchNormalNorm : BatchNormalNormWith<T, Epilogue::none> {
  static constexpr const char* name = "BatchNormalNorm";
  using BatchNormalNormWith<T, Epilogue::none>::BatchNormalNormWith;
};

template <class T>
struct BatchNormalNormRelu : BatchNormalNormWith<T, Epilogue::relu> {
  static constexpr const char* name = "BatchNormalNormRelu";
  using BatchNormalNormWith<T, Epilogue::relu>::BatchNormalNormWith;
};

template <class T>
struct BatchNormalNormAddRelu : BatchNormalNormWith<T, Epilogue::add_relu> {
  static constexpr const char* name = "BatchNormalNormAddRelu";
  using BatchNormalNormWith<T, Epilogue::add_relu>::BatchNormalNormWith;
};

}  // namespace nnorm::ort
