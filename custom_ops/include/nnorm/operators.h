// The operators, each declared once: its name, its inputs, its attributes with their defaults, the shapes that it
// accepts, and the problem that it gives to a device. ONNX Runtime's operators, TensorRT's plugins and the tests are
// generated from the list `AllOperators` at the end. nnorm_export/domain declares the same operators for Python.
//
// An operator is a struct. Its members are the attributes of a node, and it has
//
//   static constexpr const char* name;      of the ONNX node
//   static constexpr std::array parameters; the inputs after X, of type Arithmetic<T> where X has type T
//   static constexpr size_t operands;       how many inputs of X's type and shape follow the parameters
//   static constexpr bool any_layout;       whether the kernels also take tensors whose channels are last in memory
//   void for_each_attribute(F f);           calls f(name, value) for each attribute, an int32_t or a float
//   std::string attribute_refusal() const;  why the attributes are refused; empty if they are valid
//   std::string shape_refusal(inputs) const;  why the shapes of the inputs are refused; empty if they are valid
//   auto problem<T>(inputs, y) const;       the problem, for valid inputs
//
// inputs[i] is the Tensor of input i: X, then the parameters, then the operands.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "nnorm/problems.h"

namespace nnorm {

// The version of the domain that these operators belong to; nnorm_export/names.py has the same number.
constexpr int domain_version = 1;

using Shape = std::vector<int64_t>;

inline std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

inline std::string to_string(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", double(value));
  return text;
}

// The number of elements of a tensor of this shape, or of its axes from `first_axis` on.
inline size_t count(const Shape& shape, size_t first_axis = 0) {
  size_t product = 1;
  for (size_t i = first_axis; i < shape.size(); ++i) product *= size_t(shape[i]);
  return product;
}

// Why no tensor can have this shape; empty if one can. Kernels compute sizes with 64 bits.
inline std::string size_refusal(const Shape& shape) {
  constexpr int64_t most = std::numeric_limits<int64_t>::max() / 16;  // more than any memory, in the widest type
  int64_t product = 1;
  bool fits = true, empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return "X has a negative extent: " + to_string(shape);
    empty |= extent == 0;
    fits = fits && (extent == 0 || product <= most / extent);
    product = fits && extent != 0 ? product * extent : product;
  }
  return fits || empty ? "" : "X " + to_string(shape) + " has more elements than a tensor can have";
}

struct Tensor {
  Shape shape;
  const void* data;

  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

template <Epilogue epilogue>
struct BatchNormalNorm {
  static constexpr const char* name = epilogues[size_t(epilogue)].operator_name;
  static constexpr std::array<const char*, 6> parameters{"scale",        "shift",  "exponent_pos",
                                                         "exponent_neg", "weight", "bias"};
  static constexpr size_t operands = takes_residual<epilogue> ? 1 : 0;
  static constexpr bool any_layout = true;

  template <class F>
  void for_each_attribute(F) {}

  std::string attribute_refusal() const { return ""; }

  template <class Inputs>
  std::string shape_refusal(const Inputs& inputs) const {
    const Shape& x = inputs[0].shape;
    if (x.size() < 2) return "X must be [N, C, *spatial], it is " + to_string(x);
    if (std::string reason = size_refusal(x); !reason.empty()) return reason;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (const Shape& shape = inputs[1 + i].shape; shape.size() != 1 || shape[0] != x[1])
        return std::string(parameters[i]) + " must be [" + std::to_string(x[1]) + "], one number for each channel of X " +
               to_string(x) + "; it is " + to_string(shape);
    if (operands == 0) return "";
    const Shape& residual = inputs[1 + parameters.size()].shape;
    return residual == x ? "" : "residual must have the shape of X, " + to_string(x) + "; it is " + to_string(residual);
  }

  template <class T, class Inputs>
  ChannelProblem<T> problem(const Inputs& inputs, void* y) const {
    ChannelProblem<T> problem{};
    problem.x = inputs[0].template as<T>();
    problem.y = static_cast<T*>(y);
    static_assert(parameters.size() == ChannelProblem<T>::parameter_count);
    for (size_t i = 0; i < parameters.size(); ++i) problem.parameters[i] = inputs[1 + i].template as<Arithmetic<T>>();
    if (operands > 0) problem.residual = inputs[1 + parameters.size()].template as<T>();
    problem.epilogue = epilogue;
    const Shape& x = inputs[0].shape;
    problem.samples = size_t(x[0]);
    problem.channels = size_t(x[1]);
    problem.extent = count(x, 2);
    return problem;
  }
};

// What LayerNormalNorm and GroupNormalNorm have in common.
struct RowOperator {
  static constexpr std::array<const char*, 2> parameters{"weight", "bias"};
  static constexpr size_t operands = 0;
  static constexpr bool any_layout = false;

  float epsilon = 1e-5f, delta = 0.0031622776601683794f;  // δ = √ε

  std::string attribute_refusal() const {
    for (const auto& [name, value] : {std::pair("epsilon", epsilon), std::pair("delta", delta)})
      if (!(value >= 0 && value <= std::numeric_limits<float>::max()))  // NaN is refused
        return std::string("attribute ") + name + " must be at least 0 and finite, it is " + to_string(value);
    return "";
  }

 protected:
  // [begin, end) are the extents that weight and bias must have; meaning() describes them for the message.
  template <class Inputs, class Meaning>
  static std::string parameter_refusal(const int64_t* begin, const int64_t* end, const Inputs& inputs, Meaning meaning) {
    const Shape &weight = inputs[1].shape, &bias = inputs[2].shape;
    const auto fits = [&](const Shape& shape) { return std::equal(shape.begin(), shape.end(), begin, end); };
    if (fits(weight) && fits(bias)) return "";
    return "weight and bias must be " + to_string(Shape(begin, end)) + ", " + meaning() + "; they are " + to_string(weight) +
           " and " + to_string(bias);
  }

  // The problem without its sizes.
  template <class T, class Inputs>
  RowProblem<T> unsized_problem(const Inputs& inputs, void* y) const {
    RowProblem<T> problem{};
    problem.x = inputs[0].template as<T>();
    problem.y = static_cast<T*>(y);
    problem.weight = inputs[1].template as<Arithmetic<T>>();
    problem.bias = inputs[2].template as<Arithmetic<T>>();
    problem.epsilon = double(epsilon);
    problem.delta = double(delta);
    return problem;
  }
};

struct LayerNormalNorm : RowOperator {
  static constexpr const char* name = "LayerNormalNorm";

  int32_t axis = -1;  // the first of the normalized axes

  template <class F>
  void for_each_attribute(F f) {
    f("axis", axis);
    f("epsilon", epsilon);
    f("delta", delta);
  }

  template <class Inputs>
  std::string shape_refusal(const Inputs& inputs) const {
    const Shape& x = inputs[0].shape;
    const int64_t rank = int64_t(x.size());
    if (axis < -rank || axis >= rank)
      return "attribute axis is " + std::to_string(axis) + ", X " + to_string(x) + " has " + std::to_string(rank) +
             " axes; it must be from " + std::to_string(-rank) + " to " + std::to_string(rank - 1);
    if (std::string reason = size_refusal(x); !reason.empty()) return reason;
    const int64_t* const end = x.data() + rank;
    return parameter_refusal(axis < 0 ? end + axis : x.data() + axis, end, inputs, [&] {
      return "the axes of X " + to_string(x) + " from axis " + std::to_string(axis);
    });
  }

  template <class T, class Inputs>
  RowProblem<T> problem(const Inputs& inputs, void* y) const {
    RowProblem<T> problem = unsized_problem<T>(inputs, y);
    problem.row_length = count(inputs[1].shape);
    problem.rows = problem.row_length ? count(inputs[0].shape) / problem.row_length : 0;
    problem.period = problem.run = 1;
    return problem;
  }
};

struct GroupNormalNorm : RowOperator {
  static constexpr const char* name = "GroupNormalNorm";

  int32_t num_groups = 1;

  template <class F>
  void for_each_attribute(F f) {
    f("num_groups", num_groups);
    f("epsilon", epsilon);
    f("delta", delta);
  }

  std::string attribute_refusal() const {
    if (num_groups < 1) return "attribute num_groups must be at least 1, it is " + std::to_string(num_groups);
    return RowOperator::attribute_refusal();
  }

  template <class Inputs>
  std::string shape_refusal(const Inputs& inputs) const {
    const Shape& x = inputs[0].shape;
    if (x.size() < 2) return "X must be [N, C, *spatial], it is " + to_string(x);
    if (std::string reason = size_refusal(x); !reason.empty()) return reason;
    const std::string reason = parameter_refusal(
        &x[1], &x[1] + 1, inputs, [&] { return "one number for each channel of X " + to_string(x); });
    if (!reason.empty() || x[1] % num_groups == 0) return reason;
    return "attribute num_groups is " + std::to_string(num_groups) + ", which does not divide the channels of X " + to_string(x);
  }

  template <class T, class Inputs>
  RowProblem<T> problem(const Inputs& inputs, void* y) const {
    const Shape& x = inputs[0].shape;
    RowProblem<T> problem = unsized_problem<T>(inputs, y);
    problem.run = count(x, 2);
    problem.row_length = size_t(x[1]) / size_t(num_groups) * problem.run;
    problem.rows = size_t(x[0]) * size_t(num_groups);
    problem.period = size_t(num_groups);
    return problem;
  }
};

template <class... Operator>
struct OperatorList {};

#define NNORM_WITH_EPILOGUE(epilogue, ...) BatchNormalNorm<Epilogue::epilogue>,
using AllOperators = OperatorList<NNORM_FOR_EACH_EPILOGUE(NNORM_WITH_EPILOGUE) LayerNormalNorm, GroupNormalNorm>;
#undef NNORM_WITH_EPILOGUE

// Calls f(Operator()) for each operator.
template <class F, class... Operator>
void for_each_operator(F f, OperatorList<Operator...>) {
  (f(Operator()), ...);
}
template <class F>
void for_each_operator(F f) {
  for_each_operator(f, AllOperators());
}

}  // namespace nnorm
