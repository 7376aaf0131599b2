// The kernel for rows of at most 128 tiles, in registers: a warp has one tile, one and a half, or several short rows.
#pragma once

#include "half_rows.cuh"

namespace nnorm::cuda {

constexpr unsigned block_of_short_rows = 128;
// The elements of a thread, of `values`, that every row of a kernel for short rows has: rows with less have another kernel.
template <int values>
constexpr int certain_values = values - 8;

// `team`, a parameter of the kernel and of what belongs to it, is the number of threads that compute a row; of more than a
// warp, the greatest one.
constexpr int of_warp = int(warp_size), of_block = int(row_chains) * of_warp, of_cluster = int(tiles_of_cluster) * of_warp;

// The threads of a team that are in one warp, and have its tile.
template <int team>
constexpr int of_tile = team < of_warp ? team : of_warp;

// The elements of an access to a row of up to a tile. Narrow ones leave fewer threads without elements where a row ends.
template <class T>
constexpr int width_of_short_row = computed_by_device<T> ? widest<T> / 2 : width_of_tile<T>;

template <int team, int values, class T>
constexpr int width_of_row =
    team <= of_warp && team * values <= int(row_tile) ? width_of_short_row<T> : width_of_tile<T>;

// The launch bounds of the kernel: `threads` of the largest block, and the blocks that a multiprocessor shall hold at once
// (0: nvcc chooses). An element needs three registers, or two by the device's instructions, and the rest of a thread 24 to
// 40: nvcc would take more where a few more blocks are worth more.
//
// Rows of more than 4096 elements have blocks of any number of warps. With the registers of 640 threads, two blocks of 10
// warps fit on a multiprocessor, and four of 5.
template <int team, int values, bool whole, Weights weights, bool exact, class T>
struct BoundsOfRows {
  static constexpr bool of_any_size = team > 4 * of_warp, by_device = computed_by_device<T>;
  static constexpr bool few_registers = by_device && whole && weights == Weights::neighbors;
  static constexpr unsigned threads = team <= of_warp      ? block_of_short_rows
                                      : team == of_cluster ? of_block
                                      : of_any_size && few_registers && threads_of_multiprocessor > 1024 ? 640
                                                                                                         : team;
  static constexpr bool short_with_table = team < of_warp && weights == Weights::in_table;
  static constexpr int rest = by_device ? 32 : short_with_table ? 40 : values < 24 ? 32 : 24;
  static constexpr int registers = (by_device ? 2 : 3) * values + rest;
  // On Turing, rows of float32 would not fit into so few registers.
  static constexpr bool bounded = sizeof(Arithmetic<T>) == 4 && whole && weights != Weights::by_run && !of_any_size &&
                                  (by_device || threads_of_multiprocessor > 1024);
  static constexpr int blocks = bounded ? blocks_at_once((1 << 16) / registers / int(threads), int(threads)) : 0;
};

// The dynamic shared memory of a block: the sums of its cluster, the elements of its next row, weight and bias.
template <int team, int values, Weights weights, bool ahead, class T>
struct RowMemory {
  static constexpr size_t sums = team == of_cluster ? sizeof(SumsOfCluster) : 0;
  static constexpr size_t elements_of_warp = ahead ? row_tile * sizeof(T) : 0;
  static constexpr size_t weights_of_warp =
      weights == Weights::in_table ? bytes_of_weight_table<values, Arithmetic<T>> : 0;

  static constexpr size_t bytes(size_t warps) { return sums + warps * (elements_of_warp + weights_of_warp); }
};

// Computes rows in registers, `values` elements in each thread. A warp, or a part of one, computes a row of up to two
// tiles; in larger teams each warp has one tile: with team = of_cluster the warps of a cluster of blocks, else those of a
// block. `exact` means that rows have all elements of a team in a warp. If `ahead`, the next row is copied to shared
// memory while this one is computed.
template <int team, int values, bool whole, Weights weights, bool exact, bool ahead, class T>
__global__ void __launch_bounds__((BoundsOfRows<team, values, whole, weights, exact, T>::threads),
                                  (BoundsOfRows<team, values, whole, weights, exact, T>::blocks))
    layer_group_normal_norm_rows(Rows<T> w) {
  using Real = Arithmetic<T>;
  using Part = Tile<T, of_tile<team>, width_of_row<team, values, T>>;
  constexpr int width = Part::width, accesses = values / width;
  constexpr bool in_warp = team <= of_warp, in_cluster = team == of_cluster;
  constexpr int certain = in_warp ? certain_values<values> / width : 0;  // accesses
  static_assert(accesses <= (in_warp ? 2 : 1) * Part::accesses);
  constexpr unsigned teams_of_block = in_warp ? block_of_short_rows / team : 1;
  const unsigned warp = threadIdx.x / warp_size, blocks_of_team = in_cluster ? cluster_size() : 1;
  const unsigned tile = in_warp ? 0 : in_cluster ? cluster_rank() * (blockDim.x / warp_size) + warp : warp;
  const unsigned start = Part::start(tile);
  const auto position = [&](int k) { return start + Part::offset(k); };
  // Whether the row has all elements of this warp; the code for these tests nothing.
  const bool full = exact || tile * unsigned(row_tile) + unsigned(values * of_tile<team>) <= w.row_length;

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
  using Memory = RowMemory<team, values, weights, ahead, T>;
  NNORM_DYNAMIC_SHARED(shared);
  SumsOfCluster& sums_of_tiles = *reinterpret_cast<SumsOfCluster*>(shared);
  unsigned parities = 0;
  const auto sums_of_row = [&](auto turn, auto& sums, const auto& accumulate) {
    constexpr int terms = int(std::extent_v<std::remove_reference_t<decltype(sums)>>);
    constexpr bool two_tiles = accesses > Part::accesses;
    Sums<Part, terms> parts[two_tiles ? 2 : 1];
    accumulate([&](const auto& add) {
      for_accesses([&](int k, unsigned count) {
#pragma unroll
        for (int j = 0; j < width; ++j)
          if (whole || unsigned(j) < count) add(k * width + j, parts[k / Part::accesses].of(k * width + j));
      });
    });
    if constexpr (in_cluster)
      sums_of_cluster<turn.value>(parts[0], sums_of_tiles, unsigned((w.row_length + row_tile - 1) / row_tile), parities, sums);
    else
      sums_of_team<team, turn.value>(parts[0], sums);
    if constexpr (two_tiles) {
      Real second[terms];
      sums_of_team<team, turn.value>(parts[1], second);
#pragma unroll
      for (int i = 0; i < terms; ++i) sums[i] = (sums[i] + Real(0)) + (second[i] + Real(0));  // with the chains that are empty
    }
  };

  // No barrier is needed: a thread reads only what it copied.
  T* const next = reinterpret_cast<T*>(shared + Memory::sums + warp * Memory::elements_of_warp) + Part::start(0);
  const auto copy = [&](size_t row) {
    if (row >= w.rows) return;
    const T* const x = w.x + row * w.row_length + start;
    for_accesses([&](int k, unsigned) { copy_asynchronously<width>(next + Part::offset(k), x + Part::offset(k)); });
  };

  const unsigned team_of_warp = team < of_warp ? threadIdx.x % warp_size / team : 0;
  const size_t first_row = size_t(blockIdx.x / blocks_of_team) * teams_of_block + (in_warp ? threadIdx.x / team : 0);
  const size_t step = size_t(gridDim.x / blocks_of_team) * teams_of_block;
  if constexpr (in_cluster) {
    if (!have_clusters) return;
    if (threadIdx.x == 0)
      for (Arrivals& arrivals : sums_of_tiles.arrivals) prepare(arrivals);
    cluster_barrier();
  }
  if constexpr (ahead) copy(first_row);
  const WeightTable<values, width, T> table(shared + Memory::sums + blockDim.x / warp_size * Memory::elements_of_warp +
                                            warp * Memory::weights_of_warp);
  size_t in_table = w.period;
  const auto fill = [&](size_t of_period) {
#pragma unroll 1
    for (int k = 0; k < accesses && position(k) < w.row_length; ++k) {
      Real weight[width], bias[width];
      load_by_run<whole>(w, of_period * (w.row_length / w.run), position(k), unsigned(width), weight, bias);
      table.store_access(k, weight, bias);
    }
  };
  // The threads of a warp add together, so that its teams stay together: those without a row compute the last one again.
  for (size_t own = first_row; own - team_of_warp < w.rows; own += step) {
    const size_t row = team < of_warp && own >= w.rows ? w.rows - 1 : own;
    if constexpr (weights == Weights::in_table) {
      const size_t of_period = row % w.period;
      if (of_period != in_table) fill(of_period);
      in_table = of_period;
    }
    if constexpr (ahead) wait_for_copies();
    const T* const x = ahead ? next : w.x + row * w.row_length + start;
    RowArithmetic<T, values, team> arithmetic;
    for_accesses([&](int k, unsigned count) {
      const Access<T, width> access = load_part<whole, width>(x + Part::offset(k), count);
#pragma unroll
      for (int j = 0; j < width; ++j) arithmetic.x[k * width + j] = widened(access.values[j]);
    });
    arithmetic.begin(sums_of_row);
    if constexpr (ahead) copy(row + step);
    arithmetic.finish(w, sums_of_row);

    if (own > row) continue;
    T* const y = w.y + row * w.row_length + start;
    const size_t weights_of_row = first_weight(w, row);
    arithmetic.for_results(w, [&](const auto& result) {
      for_accesses([&](int k, unsigned count) {
        Real weight[width], bias[width], results[width];
        if constexpr (weights == Weights::neighbors)
          load_neighbors(w, weights_of_row, start, Part::offset(k), weight, bias);
        else if constexpr (weights == Weights::in_table)
          table.load_access(k, weight, bias);
        else
          load_by_run<whole>(w, weights_of_row, position(k), count, weight, bias);
#pragma unroll
        for (int j = 0; j < width; ++j) results[j] = result(k * width + j, weight[j], bias[j]);
        store_part<whole>(y + Part::offset(k), narrowed<T>(results), count);
      });
    });
  }
  if constexpr (in_cluster) cluster_barrier();  // CUDA asks that no block ends before the last access to its memory
}

}  // namespace nnorm::cuda
