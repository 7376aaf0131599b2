// The operators as every runtime sees them: what the shapes of their inputs must be, and which problem those pose.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nnorm/problems.h"

namespace nnorm {

using Shape = std::vector<int64_t>;

std::string to_string(const Shape& shape);
size_t count(const Shape& shape, size_t first_axis = 0);

// Attributes that a node lacks have the values that the bodies give them (nnorm_export/operators/rows.py): δ = √ε.
constexpr float default_epsilon = 1e-5f, default_delta = 0.0031622776601683794f;
constexpr int64_t default_axis = -1, default_groups = 1;

// Why an operator does not take inputs of these shapes, X's first; nothing if it does.
std::string channels_refusal(const std::vector<Shape>& shapes);                    // BatchNormalNorm and its epilogues
std::string layer_refusal(int64_t axis, const std::vector<Shape>& shapes);         // LayerNormalNorm
std::string group_refusal(int64_t num_groups, const std::vector<Shape>& shapes);   // GroupNormalNorm
std::string attribute_refusal(const char* name, double value);                     // ε and δ
std::string attribute_refusal(int64_t num_groups);

// The sizes of the problem that such inputs pose.
template <class T>
void set_sizes(ChannelProblem<T>& problem, const Shape& x) {
  problem.samples = size_t(x[0]);
  problem.channels = size_t(x[1]);
  problem.extent = count(x, 2);
}

template <class T>
void set_layer_sizes(RowProblem<T>& problem, const Shape& x, const Shape& normalized) {
  problem.row_length = count(normalized);
  problem.rows = problem.row_length ? count(x) / problem.row_length : 0;
  problem.period = problem.run = 1;
}

template <class T>
void set_group_sizes(RowProblem<T>& problem, const Shape& x, size_t num_groups) {
  problem.run = count(x, 2);
  problem.row_length = size_t(x[1]) / num_groups * problem.run;
  problem.rows = size_t(x[0]) * num_groups;
  problem.period = num_groups;
}

}  // namespace nnorm
