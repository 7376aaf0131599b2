// LayerNormalNorm and GroupNormalNorm: the operators that take mean, variance and λ̂ from their input, row by row.
#pragma once

#include "operator.h"

namespace nnorm::ort {

// What both have: X, weight and bias, ε and δ.
template <class T>
class NormalNormRows {
 public:
  static constexpr size_t parameters = 2, operands = 0;
  explicit NormalNormRows(const Attributes& attributes);

 protected:
  // What a node asks for, but for its sizes and y; `shapes` become the inputs'.
  RowProblem<T> problem(const Run& run, std::vector<Shape>& shapes) const;

 private:
  double epsilon_, delta_;
};

template <class T>
struct LayerNormalNorm : NormalNormRows<T> {
  static constexpr const char* name = "LayerNormalNorm";
  explicit LayerNormalNorm(const Attributes& attributes);
  void operator()(const Run& run) const;

 private:
  int64_t axis_;
};

template <class T>
struct GroupNormalNorm : NormalNormRows<T> {
  static constexpr const char* name = "GroupNormalNorm";
  explicit GroupNormalNorm(const Attributes& attributes);
  void operator()(const Run& run) const;

 private:
  int64_t num_groups_;
};

}  // namespace nnorm::ort
