// The kernel for so few rows that most of a device would be idle: a block has one row, and each thread four elements of it.
//
// Few rows take as long as one thread, so each thread has few elements. All threads share what the order of
// nnorm/row_statistics.h leaves open: the logarithms and ψ. Two warps for each tile make the sums: one for the first
// neighbors, one for the second.
#pragma once

#include "rows.cuh"

namespace nnorm::cuda {

constexpr int values_of_few_rows = 4, tiles_of_few_rows = 4;
constexpr unsigned shortest_of_few_rows = 257, longest_of_few_rows = unsigned(tiles_of_few_rows * row_tile);

// Not for float64, and not where the device's instructions compute ψ, which take less time.
template <class T>
constexpr bool have_few_rows = !computed_by_device<T> && sizeof(Arithmetic<T>) == 4;

// Whole warps.
constexpr unsigned threads_of_few_rows(unsigned row_length) {
  return unsigned(divided_up(row_length, size_t(values_of_few_rows) * warp_size)) * warp_size;
}
constexpr int most_threads_of_few_rows = int(threads_of_few_rows(longest_of_few_rows));
static_assert(threads_of_few_rows(shortest_of_few_rows) >= lane_sums * warp_size, "two warps for each tile");

// What the threads of a block share in dynamic memory.
template <class Real>
size_t bytes_of_few_rows(unsigned row_length) {
  return divided_up(row_length, row_tile) * row_tile * (sizeof(Log2<Real>) + sizeof(Real));
}

template <bool whole, class T>
__global__ void __launch_bounds__(most_threads_of_few_rows) layer_group_normal_norm_few_rows(Rows<T> w) {
  using Real = Arithmetic<T>;
  constexpr int width = Tile<T>::width, accesses = values_of_few_rows / width;
  static_assert(have_few_rows<T> && width == int(lane_sums));
  NNORM_DYNAMIC_SHARED(shared);
  // For each turn: no barrier is between the reads of a turn and the writes of the next.
  __shared__ Real parts[3][4][tiles_of_few_rows][lane_sums];

  const unsigned length = w.row_length, tiles = unsigned((length + row_tile - 1) / row_tile);
  Log2<Real>* const log_of_row = reinterpret_cast<Log2<Real>*>(shared);
  Real* const of_row = reinterpret_cast<Real*>(log_of_row + tiles * unsigned(row_tile));
  const T* const x = w.x + size_t(blockIdx.x) * length;
  T* const y = w.y + size_t(blockIdx.x) * length;

  // Calls f(k, position, count) for the accesses of this thread, with the number of elements that the row has from there.
  const auto for_accesses = [&](const auto& f) {
#pragma unroll
    for (int k = 0; k < accesses; ++k) {
      const unsigned position = (unsigned(k) * blockDim.x + threadIdx.x) * unsigned(width);
      if (position < length) f(k, position, length - position);
    }
  };
  const unsigned warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  // Sums for all threads what add(i, sums) adds for each element i.
  const auto sums_of_row = [&](auto turn, auto& sums, const auto& add) {
    constexpr int count = int(std::extent_v<std::remove_reference_t<decltype(sums)>>);
    if (warp < unsigned(lane_sums) * tiles) {
      const unsigned tile = warp / unsigned(lane_sums), place = warp % unsigned(lane_sums);
      Real own[count] = {};
#pragma unroll
      for (unsigned k = 0; k < unsigned(row_tile / tile_lanes / lane_sums); ++k) {
        const unsigned i = tile * unsigned(row_tile) + (k * warp_size + lane) * unsigned(lane_sums) + place;
        if (i < length) add(i, own);
      }
      sum_over_lanes<int(warp_size)>(own);
      if (lane % lanes_of_sum<count> == 0) parts[turn.value][lane / lanes_of_sum<count>][tile][place] = own[0];
    }
    __syncthreads();
    add_chains<tiles_of_few_rows>(sums, [&](unsigned sum, unsigned chain) {
      const Real(&of_tile)[lane_sums] = parts[turn.value][sum][chain];
      return chain < tiles ? of_tile[0] + of_tile[1] : Real(0);
    });
  };

  Real h[values_of_few_rows], weight[accesses][width], bias[accesses][width];
  const size_t weights_of_row = first_weight(w, blockIdx.x);
  for_accesses([&](int k, unsigned position, unsigned count) {
    const Access<T, width> access = load_part<whole, width>(x + position, count);
    // Before the elements are waited for, so that both are on their way at a time.
    if (w.whole_weights)
      load_neighbors(w, weights_of_row, position, 0, weight[k], bias[k]);
    else
      load_by_run<whole>(w, weights_of_row, position, count, weight[k], bias[k]);
#pragma unroll
    for (int j = 0; j < width; ++j) {
      h[k * width + j] = widened(access.values[j]);
      if (whole || unsigned(j) < count) of_row[position + unsigned(j)] = h[k * width + j];
    }
  });
  __syncthreads();

  Real sum[1], moments[2], sums[4];
  sums_of_row(Turn<0>(), sum, [&](unsigned i, Real* part) { part[0] += of_row[i]; });
  const Real mean = sum[0] / w.length;
  sums_of_row(Turn<1>(), moments, [&](unsigned i, Real* part) { add_moments(of_row[i] - mean, part[0], part[1]); });

  const Standardization<Real> standardize = standardization_of(mean, moments, w.inverse_length, w.epsilon);
  Log2<Real> log[values_of_few_rows];
  for_accesses([&](int k, unsigned position, unsigned count) {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const int i = k * width + j;
      h[i] = standardize(h[i]);
      log[i] = Accurate::log2_1p(magnitude(h[i]));
      if (!whole && unsigned(j) >= count) continue;
      of_row[position + unsigned(j)] = h[i];
      log_of_row[position + unsigned(j)] = log[i];
    }
  });
  __syncthreads();
  sums_of_row(Turn<2>(), sums, [&](unsigned i, Real* part) {
    add_lmbda_terms(of_row[i], std::fabs(of_row[i]), log_of_row[i], part[0], part[1], part[2], part[3]);
  });

  const Psi<T> psi = Psi<T>::from(sums, w.inverse_length, w.delta);
  for_accesses([&](int k, unsigned position, unsigned count) {
    Real results[width];
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const int i = k * width + j;
      results[j] = result_of<Accurate, false>(h[i], log[i], psi.pos, psi.neg, weight[k][j], bias[k][j]);
    }
    store_part<whole>(y + position, narrowed<T>(results), count);
  });
}

}  // namespace nnorm::cuda
