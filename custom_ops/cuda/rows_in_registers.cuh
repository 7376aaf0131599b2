// The kernel for rows of at most 128 tiles: each warp keeps a tile in its registers, or one and a half.
#pragma once

#include "half_rows.cuh"

namespace nnorm::cuda {

constexpr unsigned block_of_short_rows = 128;
// The accesses of a row that only some rows of a kernel for short rows have: those of its last 8 elements a thread.
constexpr int values_step = 8;

constexpr int of_cluster = int(tiles_of_cluster);  // the parameter `tiles` of the kernel for clusters

template <class T>
constexpr int values_of_tile = Tile<T>::accesses * Tile<T>::width;

// The launch bounds of the kernel: `threads` of the largest block, and the blocks that a multiprocessor shall hold at once
// (0: nvcc chooses). An element needs three registers, or two by the device's instructions, and the rest of a thread 24 to
// 40: nvcc would take more where a few more blocks are worth more.
//
// Rows of more than 4 tiles have blocks of any number of warps. With the registers of 640 threads, two blocks of 10 warps
// fit on a multiprocessor, and four of 5.
template <int tiles, int values, bool whole, Weights weights, bool exact, class T>
struct BoundsOfRows {
  static constexpr bool of_any_size = tiles > 4, by_device = computed_by_device<T>;
  static constexpr bool few_registers = by_device && whole && weights == Weights::neighbors;
  static constexpr unsigned threads = tiles == 1            ? block_of_short_rows
                                      : tiles == of_cluster ? unsigned(row_chains) * warp_size
                                      : of_any_size && few_registers && threads_of_multiprocessor > 1024
                                          ? 640
                                          : unsigned(tiles) * warp_size;
  static constexpr int rest = !by_device ? (values < 24 ? 32 : 24) : exact || tiles > 1 ? 32 : 40;
  static constexpr int registers = (by_device ? 2 : 3) * values + rest;
  // On Turing, rows of float32 would not fit into so few registers.
  static constexpr bool bounded = sizeof(Arithmetic<T>) == 4 && whole && weights != Weights::by_run && !of_any_size &&
                                  (by_device || threads_of_multiprocessor > 1024);
  static constexpr int blocks = bounded ? blocks_at_once((1 << 16) / registers / int(threads), int(threads)) : 0;
};

// Where the weights of a row begin. The division takes a twentieth of the instructions of a row of 256 16-bit elements.
template <class T>
NNORM_DEVICE size_t first_weight(const Rows<T>& w, size_t row) {
  if (computed_by_device<T> && w.period == 1) return 0;
  return row % w.period * (w.row_length / w.run);
}

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
__global__ void __launch_bounds__((BoundsOfRows<tiles, values, whole, weights, exact, T>::threads),
                                  (BoundsOfRows<tiles, values, whole, weights, exact, T>::blocks))
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
    RowArithmetic<T, values> arithmetic;
    for_accesses([&](int k, unsigned count) {
      const Access<T, width> access = load_part<whole>(x + Tile<T>::offset(k), count);
#pragma unroll
      for (int j = 0; j < width; ++j) arithmetic.x[k * width + j] = widened(access.values[j]);
    });
    arithmetic.begin(sums_of_row);
    if constexpr (ahead) copy(row + step);
    arithmetic.finish(w, sums_of_row);

    const size_t weights_of_row = first_weight(w, row);
    arithmetic.for_results(w, [&](const auto& result) {
      for_accesses([&](int k, unsigned count) {
        Real weight[width], bias[width], results[width];
        if constexpr (weights == Weights::neighbors)
          load_neighbors(w, weights_of_row, start, Tile<T>::offset(k), weight, bias);
        else if constexpr (weights == Weights::in_table)
          table.load_access(k, weight, bias);
        else
          load_by_run<true>(w, weights_of_row, position(k), count, weight, bias);
#pragma unroll
        for (int j = 0; j < width; ++j) results[j] = result(k * width + j, weight[j], bias[j]);
        store_part<whole>(y + Tile<T>::offset(k), narrowed<T>(results), count);
      });
    });
  }
  if constexpr (in_cluster) cluster_barrier();  // CUDA asks that no block ends before the last access to its memory
}

}  // namespace nnorm::cuda
