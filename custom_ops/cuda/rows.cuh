// What the kernels for rows share: their work, and how weight and bias of an element are found.
#pragma once

#include "launch.cuh"
#include "tiles.cuh"

namespace nnorm::cuda {

template <class T>
struct Rows {
  using Real = Arithmetic<T>;

  const T* x;
  T* y;
  const Real* weight;
  const Real* bias;
  size_t rows, period;
  unsigned row_length;
  unsigned run;         // neighboring elements that share one weight
  Divisor run_divisor;  // by `run`
  bool whole_weights;   // run is 1, and weight and bias can be read with the accesses of x
  Real epsilon, delta;
  Real length, inverse_length;
  Real bounded_exponent;  // see the function bounded_exponent()
};

// Loads `count` neighboring numbers with accesses of at most 16 bytes.
template <int count, class Real>
NNORM_DEVICE void load_all(const Real* from, Real (&to)[count]) {
  constexpr int width = count < widest<Real> ? count : widest<Real>;
#pragma unroll
  for (int i = 0; i < count; i += width) {
    const Access<Real, width> access = load<width>(from + i);
    for (int j = 0; j < width; ++j) to[i + j] = access.values[j];
  }
}

// Where the weights of a row begin. The division takes a twentieth of the instructions of a row of 256 16-bit elements.
template <class T>
NNORM_DEVICE size_t first_weight(const Rows<T>& w, size_t row) {
  if (w.period == 1) return 0;
  return row % w.period * (w.row_length / w.run);
}

// Where a kernel for rows finds weight and bias: side by side (w.whole_weights), in its WeightTable, or by the run of each
// access or element.
enum class Weights { neighbors, in_table, by_run };

// Loads weight and bias of `count` elements, from element start + offset of a row.
template <int width, class T>
NNORM_DEVICE void load_neighbors(const Rows<T>& w, size_t weights_of_row, unsigned start, unsigned offset,
                                 Arithmetic<T> (&weight)[width], Arithmetic<T> (&bias)[width]) {
  load_all(w.weight + (weights_of_row + start) + offset, weight);
  load_all(w.bias + (weights_of_row + start) + offset, bias);
}

// The same by the run of each element, or of the access as a whole if `by_access` and it lies in one run.
template <bool by_access, int width, class T>
NNORM_DEVICE void load_by_run(const Rows<T>& w, size_t weights_of_row, unsigned position, unsigned count,
                              Arithmetic<T> (&weight)[width], Arithmetic<T> (&bias)[width]) {
  if (by_access && w.run % unsigned(width) == 0) {
    const size_t i = weights_of_row + w.run_divisor.divide(position);
    const Arithmetic<T> its_weight = w.weight[i], its_bias = w.bias[i];
#pragma unroll
    for (int j = 0; j < width; ++j) weight[j] = its_weight, bias[j] = its_bias;
  } else {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      if (unsigned(j) >= count) continue;
      const size_t i = weights_of_row + w.run_divisor.divide(position + unsigned(j));
      weight[j] = w.weight[i];
      bias[j] = w.bias[i];
    }
  }
}

template <int values, class Real>
constexpr size_t bytes_of_weight_table = size_t(values) * warp_size * 2 * sizeof(Real);  // of a warp

// Weight and bias of a thread's accesses to a tile, which it keeps in shared memory. No barrier is needed: a thread reads
// only what it wrote. In registers the quotients by the run would take the place of other blocks: 168 instead of 128.
template <int values, int width, class T>
class WeightTable {
  using Real = Arithmetic<T>;
  static constexpr int part = widest<Real>, parts = 2 * width / part;
  static_assert(2 * width % part == 0);

 public:
  // `memory` is that of the warp.
  explicit NNORM_DEVICE WeightTable(unsigned char* memory)
      : values_(reinterpret_cast<Real*>(memory) + threadIdx.x % warp_size * unsigned(part)) {}

  NNORM_DEVICE void store_access(int k, const Real (&weight)[width], const Real (&bias)[width]) const {
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      Access<Real, part> access;
#pragma unroll
      for (int j = 0; j < part; ++j) {
        const int n = i * part + j;
        access.values[j] = n < width ? weight[n % width] : bias[n % width];
      }
      store(place(k, i), access);
    }
  }
  NNORM_DEVICE void load_access(int k, Real (&weight)[width], Real (&bias)[width]) const {
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const Access<Real, part> access = load<part>(place(k, i));
#pragma unroll
      for (int j = 0; j < part; ++j) {
        const int n = i * part + j;
        if (n < width)
          weight[n % width] = access.values[j];
        else
          bias[n % width] = access.values[j];
      }
    }
  }

 private:
  // Neighboring lanes have neighboring parts, so that no two lanes need the same bank at a time.
  NNORM_DEVICE Real* place(int k, int i) const { return values_ + unsigned(k * parts + i) * warp_size * unsigned(part); }

  Real* values_;
};

template <class T>
using Psi = RowBranches<Evaluation<T>, Arithmetic<T>>;

// Whether the elements of a row need no clamp; tested once for each row.
template <class T>
NNORM_DEVICE bool is_bounded(const Psi<T>& psi, Arithmetic<T> bounded_exponent) {
  return std::fabs(psi.pos.eta) <= bounded_exponent && std::fabs(psi.neg.eta) <= bounded_exponent;
}

template <int number>
using Turn = std::integral_constant<int, number>;

}  // namespace nnorm::cuda
