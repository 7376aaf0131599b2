// LayerNormalNorm and GroupNormalNorm: y = weight·ψ((x − mean)/√(var + ε); λ̂) + bias, with mean, biased variance and λ̂
// of each row (NN eq. 3, 5–15).
//
// A row is read from memory once if it fits into the registers of a warp or a part of one, of a block (up to 16384 elements,
// 4096 in float64) or of a cluster of blocks (up to 131072, if it consists of whole accesses, and not in float64), or into
// the shared memory of a block. Longer rows are read four times. Sums are in the order of nnorm/row_statistics.h: each warp
// reads whole tiles of a row, or, in few_rows.cuh, adds them from shared memory.
//
// As on CPUs, the result for a row of equal elements with ε = 0 is NaN.
#pragma once

#include <numeric>

#include "few_rows.cuh"
#include "long_rows.cuh"
#include "rows_in_registers.cuh"

namespace nnorm::cuda {

// The shared memory that holds a row. The last access of a row that is not whole extends beyond its end and is stored too.
template <class T>
size_t bytes_of_row(const Rows<T>& work) {
  return divided_up(work.row_length * sizeof(T), access_bytes) * access_bytes;
}

// The blocks for a kernel whose blocks have tables: at most `most`, and the next row of each team has the same weights.
template <class T>
unsigned blocks_with_tables(const Rows<T>& work, size_t teams_of_block, unsigned most) {
  const size_t wanted = divided_up(work.rows, teams_of_block), together = work.period / std::gcd(work.period, teams_of_block);
  if (wanted <= most) return unsigned(wanted);
  return most < together ? most : unsigned(most / together * together);
}

template <int team, int values, bool whole, Weights weights, bool exact, class T>
cudaError_t launch_rows(const Rows<T>& work, const Device& device, cudaStream_t stream) {
  constexpr bool ahead = whole && team == of_block, in_warp = team <= of_warp, in_table = weights == Weights::in_table;
  const unsigned warps = in_warp ? block_of_short_rows / warp_size : unsigned(divided_up(work.row_length, row_tile));
  const unsigned teams_of_block = in_warp ? block_of_short_rows / team : 1;
  const size_t shared = RowMemory<team, values, weights, ahead, T>::bytes(warps), room = device.dynamic_shared_memory();
  if constexpr (in_table && team == of_block) {
    if (shared > room) return launch_rows<team, values, whole, Weights::by_run, exact>(work, device, stream);
  } else {
    static_assert(RowMemory<team, values, weights, ahead, T>::bytes(4) <= 63 << 10, "every GPU since Turing has as much");
  }
  // A block that copies its next row or has a table should have many rows, so there are as many blocks as run at once. For
  // other rows this was measured on an H200: it pays in a warp by the device's instructions, or of 24 elements a thread.
  using Bounds = BoundsOfRows<team, values, whole, weights, exact, T>;
  constexpr bool persistent = ahead || in_table || (in_warp && Bounds::blocks > 0 && (computed_by_device<T> || values == 24));
  unsigned at_once = std::max(Bounds::blocks, 1) * Bounds::threads / warp_size / warps;
  // A multiprocessor has 1 KiB more than a block may have, which is 1 KiB more than `room`, and takes 1 KiB for each block.
  if constexpr (in_table) at_once = std::clamp(unsigned((room + 2048) / (shared + 1024)), 1u, at_once);
  const size_t wanted = divided_up(work.rows, teams_of_block);
  const unsigned blocks = in_table     ? blocks_with_tables(work, teams_of_block, unsigned(device.multiprocessors) * at_once)
                          : persistent ? device.even_blocks(wanted, at_once)
                                       : device.blocks(wanted, 64);
  return launch(&layer_group_normal_norm_rows<team, values, whole, weights, exact, ahead, T>, blocks, warps * warp_size,
                stream, work, shared, room);
}

// Launches the kernel for rows in registers.
template <int team, int values, bool whole, class T>
cudaError_t run_in_registers(const Rows<T>& work, const Device& device, cudaStream_t stream) {
  if constexpr (whole) {
    // In a row of a warp the tests take a tenth of the time; in longer rows they are a small part.
    if constexpr (team <= of_warp)
      if (work.whole_weights && work.row_length == unsigned(values * team))
        return launch_rows<team, values, whole, Weights::neighbors, true>(work, device, stream);
    if (work.whole_weights) return launch_rows<team, values, whole, Weights::neighbors, false>(work, device, stream);
    // float64 has no tables, because its elements take all registers either way.
    constexpr Weights others = sizeof(Arithmetic<T>) == 4 ? Weights::in_table : Weights::by_run;
    return launch_rows<team, values, whole, others, false>(work, device, stream);
  } else {
    return launch_rows<team, values, whole, Weights::by_run, false>(work, device, stream);
  }
}

struct ClusterShape {
  unsigned blocks, warps;  // warps of a block
};

// A thread has up to 128 registers, so that a multiprocessor holds 16 warps. Of the shapes with at most 8 warps in a block
// this is the one with which multiprocessors hold the most rows. Measured on an H200 (float32): 2 × 8 took 0.98 of the
// time of 1 × 16, 4 × 8 0.99 of 8 × 4, 8 × 8 0.99 of 4 × 16.
inline ClusterShape shape_of_cluster(size_t tiles) {
  constexpr size_t resident = 16, most = 8;
  ClusterShape best{most_blocks_of_cluster, unsigned(divided_up(tiles, most_blocks_of_cluster))};
  for (size_t blocks = most_blocks_of_cluster; blocks > 1; --blocks) {
    const size_t warps = divided_up(tiles, blocks);
    if (warps <= most && resident / warps * best.blocks >= resident / best.warps * blocks)
      best = {unsigned(blocks), unsigned(warps)};
  }
  return best;
}

// Launches the kernel for rows in the registers of clusters; `ran` is false if the device has none.
template <Weights weights, class T>
cudaError_t run_in_clusters(const Rows<T>& work, const Device& device, cudaStream_t stream, bool& ran) {
  static KnownClusters known;
  const auto kernel = &layer_group_normal_norm_rows<of_cluster, 32, true, weights, false, true, T>;
  const ClusterShape shape = shape_of_cluster(divided_up(work.row_length, row_tile));
  const unsigned threads = shape.warps * warp_size;
  const size_t shared = RowMemory<of_cluster, 32, weights, true, T>::bytes(shape.warps), room = device.dynamic_shared_memory();
  if (shared > room) {
    if constexpr (weights == Weights::in_table) return run_in_clusters<Weights::by_run>(work, device, stream, ran);
    return cudaSuccess;
  }
  const unsigned clusters = clusters_at_once(kernel, device.ordinal, shape.blocks, threads, shared, room, known);
  ran = clusters > 0;
  if (!ran) return cudaSuccess;
  const unsigned teams = weights == Weights::in_table ? blocks_with_tables(work, 1, clusters)
                                                      : unsigned(std::min(work.rows, size_t(clusters)));
  return launch(kernel, teams * shape.blocks, threads, stream, work, shared, room, shape.blocks);
}

// `threads` of a warp that compute a row, `values` elements in each.
template <int threads_, int values_>
struct Team {
  static constexpr int threads = threads_, values = values_, longest = threads * values;
};

// A row has the first of these teams that suffices.
template <class... All>
struct Teams {
  // The threads of its team, or 0 if none suffices.
  static constexpr unsigned threads_for(unsigned row_length) {
    unsigned threads = 0;
    ((threads = threads == 0 && row_length <= unsigned(All::longest) ? unsigned(All::threads) : threads), ...);
    return threads;
  }
  // Whether every row of a team has the elements that its kernel does not test.
  static constexpr bool are_certain() {
    int before = 0;
    bool all = true;
    ((all &= All::threads * certain_values<All::values> <= before, before = All::longest), ...);
    return all;
  }
};

// A warp has one row. With two warps for up to one and a half tiles, half of the second one's registers would be idle. A
// thread has no registers for so many float64 elements.
template <bool whole, class T>
using OneRow = std::conditional_t<whole && sizeof(Arithmetic<T>) == 4,
                                  Teams<Team<32, 8>, Team<32, 16>, Team<32, 24>, Team<32, 32>, Team<32, 40>, Team<32, 48>>,
                                  Teams<Team<32, 8>, Team<32, 16>, Team<32, 24>, Team<32, 32>>>;

// A warp has two rows or four, and pays once for them what a row costs beside its elements: a third of the instructions in a
// row of 256 elements, half if the device's instructions compute ψ (an H200 counted them when a warp had one row).
template <class T>
using SeveralRows = std::conditional_t<
    computed_by_device<T>, Teams<Team<8, 8>, Team<8, 16>, Team<8, 24>, Team<8, 32>, Team<16, 24>, Team<16, 32>>,
    Teams<Team<16, 8>, Team<16, 16>, Team<16, 24>>>;
template <bool whole, class T>
constexpr bool have_several_rows = whole && sizeof(Arithmetic<T>) == 4;

static_assert(OneRow<true, float>::are_certain() && SeveralRows<float>::are_certain() && SeveralRows<Float16>::are_certain());

// One of them must suffice.
template <bool whole, class T, class First, class... Others>
cudaError_t run_in_warps(Teams<First, Others...>, const Rows<T>& work, const Device& device, cudaStream_t stream) {
  if constexpr (sizeof...(Others) > 0)
    if (work.row_length > unsigned(First::longest))
      return run_in_warps<whole>(Teams<Others...>(), work, device, stream);
  return run_in_registers<First::threads, First::values, whole>(work, device, stream);
}

// The threads that compute a row; 0 if it has more than a warp and is not one of few rows.
//
// - A block, if all blocks run at once, and at most two on each multiprocessor.
// - A part of a warp, if there are more than 16 warps for each multiprocessor, four for each scheduler: with fewer warps it
//   waits most of the time.
// - A warp.
template <bool whole, class T>
unsigned threads_of_row(size_t rows, unsigned row_length, size_t multiprocessors) {
  if (have_few_rows<T> && row_length >= shortest_of_few_rows && row_length <= longest_of_few_rows) {
    const unsigned threads = threads_of_few_rows(row_length);
    const size_t at_once = divided_up(rows, multiprocessors);
    if (at_once <= 2 && at_once * threads <= most_threads_of_few_rows) return threads;
  }
  if (have_several_rows<whole, T>) {
    const unsigned threads = SeveralRows<T>::threads_for(row_length);
    if (rows * threads > multiprocessors * 16 * warp_size) return threads;
  }
  return OneRow<whole, T>::threads_for(row_length);
}

template <bool whole, class T>
cudaError_t run_rows(const Rows<T>& work, const Device& device, cudaStream_t stream) {
  const unsigned threads = threads_of_row<whole, T>(work.rows, work.row_length, size_t(device.multiprocessors));
  if constexpr (have_few_rows<T>)
    if (threads > warp_size)
      return launch(&layer_group_normal_norm_few_rows<whole, T>, unsigned(work.rows), threads, stream, work,
                    bytes_of_few_rows<Arithmetic<T>>(work.row_length), device.dynamic_shared_memory());
  if constexpr (have_several_rows<whole, T>)
    if (threads > 0 && threads < warp_size) return run_in_warps<whole>(SeveralRows<T>(), work, device, stream);
  if (threads == warp_size) return run_in_warps<whole>(OneRow<whole, T>(), work, device, stream);
  if (work.row_length <= 4 * row_tile) return run_in_registers<4 * of_warp, 32, whole>(work, device, stream);
  const size_t bytes = bytes_of_row(work), room = device.dynamic_shared_memory();
  // A thread has no registers for so many float64 elements.
  if constexpr (sizeof(Arithmetic<T>) == 4)
    if (work.row_length <= row_chains * row_tile && (!whole || row_chains * row_tile * sizeof(T) <= room))
      return run_in_registers<of_block, 32, whole>(work, device, stream);
  if constexpr (whole && sizeof(Arithmetic<T>) == 4)
    if (work.row_length > row_chains * row_tile && work.row_length <= tiles_of_cluster * row_tile) {
      bool ran = false;
      const cudaError_t error = work.whole_weights ? run_in_clusters<Weights::neighbors>(work, device, stream, ran)
                                                   : run_in_clusters<Weights::in_table>(work, device, stream, ran);
      if (error || ran) return error;
    }
  const unsigned blocks = device.blocks(work.rows, 16);
  if (bytes <= room)
    return launch(&layer_group_normal_norm_long_rows<true, whole, T>, blocks, long_row_threads, stream, work, bytes, room);
  return launch(&layer_group_normal_norm_long_rows<false, whole, T>, blocks, long_row_threads, stream, work);
}

// The greatest exponent for which no element of a row of this length saturates 2^z. A standardized value is at most the
// root of the row's length. Twice that allows for rounding, except in rows whose variance consists of rounding errors.
template <class Real>
Real bounded_exponent(size_t row_length) {
  const double greatest_log2 = std::log2(1 + 2 * std::sqrt(double(row_length)));
  return Real((double(Format<Real>::exponent_bias) - 2) / greatest_log2);
}

template <class T>
cudaError_t run_any(const RowProblem<T>& problem, cudaStream_t stream) {
  if (problem.empty()) return cudaSuccess;
  if (problem.row_length >> 31 != 0) return cudaErrorInvalidValue;
  Device device;
  if (const cudaError_t error = Device::current(device)) return error;
  using Real = Arithmetic<T>;
  const size_t width = size_t(problem.row_length <= row_tile ? width_of_short_row<T> : width_of_tile<T>);
  const auto aligned = [=](const auto* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % std::min(width * sizeof(*pointer), access_bytes) == 0;
  };
  const bool whole = aligned(problem.x) && aligned(problem.y) && problem.row_length % width == 0;
  const bool aligned_weights = aligned(problem.weight) && aligned(problem.bias);
  const Rows<T> work{problem.x,
                     problem.y,
                     problem.weight,
                     problem.bias,
                     problem.rows,
                     problem.period,
                     unsigned(problem.row_length),
                     unsigned(problem.run),
                     Divisor(unsigned(problem.run)),
                     problem.run == 1 && whole && aligned_weights,
                     Real(problem.epsilon),
                     Real(problem.delta),
                     Real(problem.row_length),
                     Real(1) / Real(problem.row_length),
                     bounded_exponent<Real>(problem.row_length)};
  return whole ? run_rows<true>(work, device, stream) : run_rows<false>(work, device, stream);
}

template <class T>
cudaError_t run(const RowProblem<T>& problem, cudaStream_t stream, bool same_bits) {
  return with_elements(problem, same_bits, [=](const auto& of_elements) { return run_any(of_elements, stream); });
}

}  // namespace nnorm::cuda
