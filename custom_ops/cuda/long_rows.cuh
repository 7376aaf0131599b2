// The kernel for rows of any length: a block reads a row four times, from shared memory if the row fits there.
#pragma once

#include "rows.cuh"

namespace nnorm::cuda {

constexpr int long_row_threads = 512;
static_assert(long_row_threads / int(warp_size) == int(row_chains), "a warp for each chain");

// The number of accesses of a thread to a long row that are in flight together: 32 bytes. More would need so many
// registers that two blocks do not fit on a multiprocessor.
template <class T>
constexpr int accesses_in_flight = 32 / int(Tile<T>::width * sizeof(T));

// Calls use(start, accesses) for all accesses of a thread, several at once, and end_of_tile() after those of each tile.
template <bool whole, class T, class Use, class End>
NNORM_DEVICE void for_each_access(const T* row, unsigned length, Use use, End end_of_tile) {
  static_assert(Tile<T>::accesses % accesses_in_flight<T> == 0);
  for (unsigned tile = threadIdx.x / warp_size; size_t(tile) * row_tile < length; tile += unsigned(row_chains)) {
#pragma unroll 1
    for (int first = 0; first < Tile<T>::accesses; first += accesses_in_flight<T>) {
      const unsigned start = Tile<T>::start(tile) + Tile<T>::offset(first);
      const T* const from = row + start;
      Access<T, Tile<T>::width> accesses[accesses_in_flight<T>] = {};
#pragma unroll
      for (int k = 0; k < accesses_in_flight<T>; ++k) {
        const unsigned position = start + Tile<T>::offset(k);
        if (position < length) accesses[k] = load_part<whole, Tile<T>::width>(from + Tile<T>::offset(k), length - position);
      }
      use(start, accesses);
    }
    end_of_tile();
  }
}

// Computes the sums over a row: add(element, sums) adds the terms of an element. see(start, accesses) is called before.
template <int turn, bool whole, int count, class T, class Add, class See>
NNORM_DEVICE void sums_of_long_row(const T* row, unsigned length, Arithmetic<T> (&sums)[count], Add add, See see) {
  constexpr int width = Tile<T>::width;
  Sums<Tile<T>, count> of_tile;
  ChainSum<Arithmetic<T>> chain{0, 0};  // the sum that this lane has after sum_of_tile()
  for_each_access<whole>(
      row, length,
      [&](unsigned start, const auto& accesses) {
        see(start, accesses);
#pragma unroll
        for (int i = 0; i < accesses_in_flight<T> * width; ++i)
          if (start + Tile<T>::offset(i / width) + unsigned(whole ? 0 : i % width) < length)
            add(widened(accesses[i / width].values[i % width]), of_tile.of(i));
      },
      [&] {
        chain.add(sum_of_tile(of_tile));
        of_tile = {};
      });
  constexpr unsigned apart = lanes_of_sum<Tile<T>::places * count>;
  const unsigned lane = threadIdx.x % warp_size;
  sums_of_chains<turn, int(row_chains)>(chain.total(), lane / apart, threadIdx.x / warp_size,
                                        lane % apart == 0 && lane < count * apart, sums);
}

// Computes rows of any length, each with one block. If `staged`, shared memory holds the row, else every pass reads it
// again.
template <bool staged, bool whole, class T>
__global__ void __launch_bounds__(long_row_threads, whole ? 2 : 1) layer_group_normal_norm_long_rows(Rows<T> w) {
  using Real = Arithmetic<T>;
  constexpr int width = Tile<T>::width;
  NNORM_DYNAMIC_SHARED(stage);

  for (size_t row = blockIdx.x; row < w.rows; row += gridDim.x) {
    const T* x = w.x + row * w.row_length;
    T* const kept = reinterpret_cast<T*>(stage);  // no barrier is needed: a thread reads only what it wrote
    const T* const again = staged ? kept : x;
    const auto keep = [&](unsigned start, const auto& accesses) {
      if constexpr (staged) {
#pragma unroll
        for (int k = 0; k < accesses_in_flight<T>; ++k)
          if (start + Tile<T>::offset(k) < w.row_length) store(kept + start + Tile<T>::offset(k), accesses[k]);
      }
    };
    const auto nothing = [](unsigned, const auto&) {};
    Real sum[1];
    sums_of_long_row<0, whole>(x, w.row_length, sum, [](Real value, Real* part) { part[0] += value; }, keep);

    const Real mean = sum[0] / w.length;
    Real moments[2];
    sums_of_long_row<1, whole>(again, w.row_length, moments, [&](Real value, Real* part) {
      add_moments(value - mean, part[0], part[1]);
    }, nothing);

    const Standardization<Real> standardize = standardization_of(mean, moments, w.inverse_length, w.epsilon);
    Real sums[4];
    sums_of_long_row<2, whole>(again, w.row_length, sums, [&](Real value, Real* part) {
      const Real h = standardize(value);
      add_lmbda_terms(h, std::fabs(h), Evaluation<T>::log2_1p(magnitude(h)), part[0], part[1], part[2], part[3]);
    }, nothing);

    const Psi<T> psi = Psi<T>::from(sums, w.inverse_length, w.delta);
    const size_t weights_of_row = first_weight(w, row);
    const auto transform = [&](unsigned start, const auto& accesses) {
      T* const y = w.y + row * w.row_length + start;
#pragma unroll
      for (int k = 0; k < accesses_in_flight<T>; ++k) {
        const unsigned position = start + Tile<T>::offset(k);
        if (position >= w.row_length) continue;
        const unsigned count = w.row_length - position;
        Real weight[width], bias[width], results[width];
        // One weight for an access is not looked for here: the registers are few, and it would be 3 % slower in bfloat16.
        if (w.whole_weights)
          load_neighbors(w, weights_of_row, start, Tile<T>::offset(k), weight, bias);
        else
          load_by_run<false>(w, weights_of_row, position, count, weight, bias);
#pragma unroll
        for (int j = 0; j < width; ++j) {  // bounded rows have no loop of their own: it would be a second copy
          const Real h = standardize(widened(accesses[k].values[j]));
          results[j] =
              result_of<Evaluation<T>, false>(h, Evaluation<T>::log2_1p(magnitude(h)), psi.pos, psi.neg, weight[j], bias[j]);
        }
        store_part<whole>(y + Tile<T>::offset(k), narrowed<T>(results), count);
      }
    };
    for_each_access<whole>(again, w.row_length, transform, [] {});
  }
}

}  // namespace nnorm::cuda
