// LayerNormalNorm and GroupNormalNorm: the operators that take mean, variance and λ̂ from their input, row by row.
#pragma once

#include "operator.h"

namespace nnorm::ort {

template <class T>
struct LayerNormalNorm {
  static constexpr const char* name = "LayerNormalNorm";
  static constexpr size_t parameters = 2, operands = 0;
  explicit LayerNormalNorm(const Attributes& attributes);
  void operator()(const Run& run) const;

 private:
  int64_t axis_;
  double epsilon_, delta_;
};

template <class T>
struct GroupNormalNorm {
  static constexpr const char* name = "GroupNormalNorm";
  static constexpr size_t parameters = 2, operands = 0;
  explicit GroupNormalNorm(const Attributes& attributes);
  void operator()(const Run& run) const;

 private:
  int64_t num_groups_;
  double epsilon_, delta_;
};

}  // namespace nnorm::ort
