// Where the tensors of a test of the CUDA kernels are, and which sizes it has.
#pragma once

#include <cstddef>
#include <vector>

namespace nnorm_test {

// Where the tensors are: how many elements after a boundary each starts, and whether y overwrites an input. `other` is
// the residual, or weight and bias of rows.
struct Place {
  size_t x, other, y;
  enum { apart, over_x, over_residual } result;
  bool has_table = false;  // of the channels
};

// What the program was asked for: no longer rows, and each `step`-th size. Each type begins with another size.
struct Selection {
  size_t longest_row = 1 << 20, step = 1, first = 0;

  template <class Geometry>
  std::vector<Geometry> of(const std::vector<Geometry>& all) const {
    std::vector<Geometry> chosen;
    for (size_t i = first % step; i < all.size(); i += step) chosen.push_back(all[i]);
    return chosen;
  }
};

}  // namespace nnorm_test
