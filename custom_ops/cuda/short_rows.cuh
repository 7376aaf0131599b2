// The kernel for rows of at most 128 tiles: each warp keeps a tile in its registers, or one and a half.
#pragma once

#include "rows.cuh"

namespace nnorm::cuda {

constexpr unsigned block_of_short_rows = 128;
// The accesses of a row that only some rows of a kernel for short rows have: those of its last 8 elements a thread.
constexpr int values_step = 8;

constexpr int of_cluster = int(tiles_of_cluster);  // the parameter `tiles` of the kernel for clusters

constexpr unsigned most_threads_for(int tiles) {
  return tiles == 1 ? block_of_short_rows : unsigned(std::min(tiles, int(row_chains))) * warp_size;
}

// The threads that a multiprocessor has at once: 512 with 128 registers each, 384 with 168 if a warp has more than one
// tile, 640 with 96 if it has three quarters of one.
template <class T>
constexpr int values_of_tile = Tile<T>::accesses * Tile<T>::width;
template <int values, class T>
constexpr unsigned threads_at_once = values > values_of_tile<T> ? 384 : values == 24 ? 640 : 512;
// 0 leaves the number of blocks to the compiler, which chooses other registers than for 1.
template <int tiles, int values, Weights weights, class T>
constexpr unsigned least_blocks_at_once =
    sizeof(Arithmetic<T>) == 4 && most_threads_for(tiles) < 512 && weights != Weights::by_run &&
            (weights == Weights::in_table || values >= 24)
        ? threads_at_once<values, T> / most_threads_for(tiles)
        : 0;

// The dynamic shared memory of a block: the sums of its cluster, the elements of its next row, weight and bias.
template <int tiles, int values, Weights weights, bool ahead, class T>
struct RowMemory {
  static constexpr size_t sums = tiles == of_cluster ? sizeof(SumsOfCluster) : 0;
  static constexpr size_t elements_of_warp = ahead ? row_tile * sizeof(T) : 0;
  static constexpr size_t weights_of_warp = weights == Weights::in_table ? WeightTable<values, T>::bytes_of_warp : 0;

  static constexpr size_t bytes(size_t warps) { return sums + warps * (elements_of_warp + weights_of_warp); }
};

// Computes rows of at most `tiles` tiles in registers, `values` elements in each thread. With tiles = 1 a warp computes a
// row of up to two tiles, else each warp one tile: with tiles = of_cluster the warps of a cluster of blocks, else those of
// a block. `exact` means that rows have all elements of a warp. If `ahead`, the next row is copied to shared memory while
// this one is computed.
template <int tiles, int values, bool whole, Weights weights, bool exact, bool ahead, class T>
__global__ void __launch_bounds__(most_threads_for(tiles), least_blocks_at_once<tiles, values, weights, T>)
    layer_group_normal_norm_rows(Rows<T> w) {
  using Real = Arithmetic<T>;
  constexpr int width = Tile<T>::width, accesses = values / width;
  constexpr bool in_warp = tiles == 1, in_cluster = tiles == of_cluster;
  constexpr int certain = in_warp ? (values - values_step) / width : 0;  // accesses that every row has
  static_assert(values <= (in_warp ? 2 : 1) * values_of_tile<T>);
  constexpr unsigned teams_of_block = in_warp ? block_of_short_rows / warp_size : 1;
  const unsigned warp = threadIdx.x / warp_size, blocks_of_team = in_cluster ? cluster_size() : 1;
  const unsigned tile = in_warp ? 0 : in_cluster ? cluster_rank() * (blockDim.x / warp_size) + warp : warp;
  const unsigned start = Tile<T>::start(tile);
  const auto position = [&](int k) { return start + Tile<T>::offset(k); };
  // Whether the row has all elements of this warp; the code for these tests nothing.
  const bool full = exact || tile * unsigned(row_tile) + unsigned(values) * warp_size <= w.row_length;

  // Calls f(k, count) for the accesses of this thread, with the number of elements that the row has from there.
  const auto for_accesses = [&](const auto& f) {
    const auto loop = [&](auto all) {
#pragma unroll
      for (int k = 0; k < accesses; ++k) {
        const bool exists = all.value || k < certain;
        if (exists || position(k) < w.row_length) f(k, exists ? unsigned(width) : w.row_length - position(k));
      }
    };
    if (full)
      loop(std::true_type());
    else
      loop(std::false_type());
  };
  using Memory = RowMemory<tiles, values, weights, ahead, T>;
  NNORM_DYNAMIC_SHARED(shared);
  SumsOfCluster& sums_of_tiles = *reinterpret_cast<SumsOfCluster*>(shared);
  unsigned parities = 0;
  // Sums the terms that add(i, sums) adds for the elements of the row.
  const auto sums_of_row = [&](auto turn, auto& sums, const auto& add) {
    constexpr int terms = int(std::extent_v<std::remove_reference_t<decltype(sums)>>);
    Sums<T, terms> parts[values > values_of_tile<T> ? 2 : 1];  // of each tile of the warp
    for_accesses([&](int k, unsigned count) {
#pragma unroll
      for (int j = 0; j < width; ++j)
        if (whole || unsigned(j) < count) add(k * width + j, parts[k / Tile<T>::accesses].of(k * width + j));
    });
    if constexpr (in_cluster)
      sums_of_cluster<turn.value, Tile<T>::places>(sum_of_tile<Tile<T>::places>(parts[0].values), sums_of_tiles,
                                                   unsigned((w.row_length + row_tile - 1) / row_tile), parities, sums);
    else
      sums_of_team<tiles, turn.value, Tile<T>::places>(parts[0].values, sums);
    if constexpr (values > values_of_tile<T>) {
      Real second[terms];
      sums_of_team<tiles, turn.value, Tile<T>::places>(parts[1].values, second);
#pragma unroll
      for (int i = 0; i < terms; ++i) sums[i] = (sums[i] + Real(0)) + (second[i] + Real(0));  // with the chains that are empty
    }
  };

  // No barrier is needed: a thread reads only what it copied.
  T* const next = reinterpret_cast<T*>(shared + Memory::sums + warp * Memory::elements_of_warp) + Tile<T>::start(0);
  const auto copy = [&](size_t row) {
    if (row >= w.rows) return;
    const T* const x = w.x + row * w.row_length + start;
    for_accesses([&](int k, unsigned) { copy_asynchronously<width>(next + Tile<T>::offset(k), x + Tile<T>::offset(k)); });
  };

  const size_t first_row = size_t(blockIdx.x / blocks_of_team) * teams_of_block + (in_warp ? warp : 0);
  const size_t step = size_t(gridDim.x / blocks_of_team) * teams_of_block;
  if constexpr (in_cluster) {
    if (!have_clusters) return;
    if (threadIdx.x == 0)
      for (Arrivals& arrivals : sums_of_tiles.arrivals) prepare(arrivals);
    cluster_barrier();
  }
  if constexpr (ahead) copy(first_row);
  const WeightTable<values, T> table(shared + Memory::sums + blockDim.x / warp_size * Memory::elements_of_warp +
                                     warp * Memory::weights_of_warp);
  size_t in_table = w.period;
  const auto fill = [&](size_t of_period) {
#pragma unroll 1
    for (int k = 0; k < accesses && position(k) < w.row_length; ++k) {
      Real weight[width], bias[width];
      load_by_run<true>(w, of_period * (w.row_length / w.run), position(k), unsigned(width), weight, bias);
      table.store_access(k, weight, bias);
    }
  };
  for (size_t row = first_row; row < w.rows; row += step) {
    if constexpr (weights == Weights::in_table) {
      const size_t of_period = row % w.period;
      if (of_period != in_table) fill(of_period);
      in_table = of_period;
    }
    if constexpr (ahead) wait_for_copies();
    const T* const x = ahead ? next : w.x + row * w.row_length + start;
    T* const y = w.y + row * w.row_length + start;
    Real h[values] = {}, sum[1];
    for_accesses([&](int k, unsigned count) {
      const Access<T, width> access = load_part<whole>(x + Tile<T>::offset(k), count);
#pragma unroll
      for (int j = 0; j < width; ++j) h[k * width + j] = widened(access.values[j]);
    });
    sums_of_row(Turn<0>(), sum, [&](int i, Real* part) { part[0] += h[i]; });
    if constexpr (ahead) copy(row + step);  // the sum needed all elements, so they have been read

    const Real mean = sum[0] / w.length;
    Real moments[2];
    sums_of_row(Turn<1>(), moments, [&](int i, Real* part) {
      h[i] -= mean;
      add_moments(h[i], part[0], part[1]);
    });

    const Standardization<Real> standardize = standardization_of(mean, moments, w.inverse_length, w.epsilon);
    Log2<Real> log[values];
    Real sums[4];
    sums_of_row(Turn<2>(), sums, [&](int i, Real* part) {
      h[i] = standardize.of_centered(h[i]);
      log[i] = Evaluation<T>::log2_1p(magnitude(h[i]));
      add_lmbda_terms(h[i], std::fabs(h[i]), log[i], part[0], part[1], part[2], part[3]);
    });

    const Psi<T> psi = Psi<T>::from(sums, w.inverse_length, w.delta);
    const size_t weights_of_row = row % w.period * (w.row_length / w.run);
    const auto transform = [&](auto bounded) {
      for_accesses([&](int k, unsigned count) {
        Real weight[width], bias[width], results[width];
        if constexpr (weights == Weights::neighbors)
          load_neighbors(w, weights_of_row, start, Tile<T>::offset(k), weight, bias);
        else if constexpr (weights == Weights::in_table)
          table.load_access(k, weight, bias);
        else
          load_by_run<true>(w, weights_of_row, position(k), count, weight, bias);
#pragma unroll
        for (int j = 0; j < width; ++j)
          results[j] = result_of<Evaluation<T>, bounded.value>(h[k * width + j], log[k * width + j], psi.pos, psi.neg,
                                                               weight[j], bias[j]);
        store_part<whole>(y + Tile<T>::offset(k), narrowed<T>(results), count);
      });
    };
    if (is_bounded<T>(psi, w.bounded_exponent))
      transform(std::true_type());
    else
      transform(std::false_type());
  }
  if constexpr (in_cluster) cluster_barrier();  // CUDA asks that no block ends before the last access to its memory
}

}  // namespace nnorm::cuda
