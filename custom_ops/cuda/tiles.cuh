// How warps read, add and write the tiles of a row (nnorm/row_statistics.h).
#pragma once

#include "cluster.cuh"
#include "nnorm/row_statistics.h"

namespace nnorm::cuda {

template <class T>
constexpr int width_of_tile = computed_by_device<T> ? widest<T> : int(lane_sums);

// The part of a tile that a thread reads: `accesses` times `width` neighboring elements. Neighbor j belongs to sum j
// mod `places`, in the order of nnorm/row_statistics.h. If the device's approximate instructions compute ψ, a lane
// has one sum and reads up to 16 bytes at a time, which takes fewer instructions: ForHalf does not give the bits of a CPU
// in any order.
//
// `threads` have a tile: a warp, or a part of one, so that a warp has several short rows. Then each has `lanes` lanes of
// the tile, whose accesses it reads in turn.
template <class T, int threads_ = int(warp_size), int width_ = width_of_tile<T>>
struct Tile {
  using Element = T;
  static constexpr int threads = threads_, width = width_, lanes = int(tile_lanes) / threads;
  static constexpr int places = computed_by_device<T> ? 1 : int(lane_sums);
  static constexpr int accesses = int(row_tile) / threads / width;

  // The position of a thread's first access to a tile, and the offset of access k from there: addresses with constant
  // offsets share their registers.
  static NNORM_DEVICE unsigned start(unsigned tile) {
    return tile * unsigned(row_tile) + threadIdx.x % unsigned(threads) * unsigned(width);
  }
  static constexpr NNORM_DEVICE unsigned offset(int k) { return unsigned(k * threads * width); }
};
static_assert(tile_lanes == warp_size);

// A thread's partial sums over its part of a tile.
template <class Part, int count>
struct Sums {
  using Real = Arithmetic<typename Part::Element>;
  static constexpr int all = Part::places * count;
  Real values[Part::lanes][all] = {};

  // The sums to which an element of the thread is added.
  NNORM_DEVICE Real* of(int element) {
    return values[element / Part::width % Part::lanes] + element % Part::width % Part::places * count;
  }

  // Adds those of the lanes in halves.
  NNORM_DEVICE Real (&of_thread())[all] {
#pragma unroll
    for (int left = Part::lanes / 2; left > 0; left /= 2)
#pragma unroll
      for (int lane = 0; lane < left; ++lane)
#pragma unroll
        for (int i = 0; i < all; ++i) values[lane][i] += values[lane + left][i];
    return values[0];
  }
};

// Loads one access of a row of which `count` elements are left; elements after the end are 0. `whole` rows consist of
// whole accesses.
template <bool whole, int width, class T>
NNORM_DEVICE Access<T, width> load_part(const T* from, unsigned count) {
  if constexpr (whole) return load<width>(from);
  Access<T, width> access{};
#pragma unroll
  for (int j = 0; j < width; ++j)
    if (unsigned(j) < count) access.values[j] = from[j];
  return access;
}

template <bool whole, int width, class T>
NNORM_DEVICE void store_part(T* to, const Access<T, width>& access, unsigned count) {
  if constexpr (whole) {
    store_global(to, access);
  } else {
#pragma unroll
    for (int j = 0; j < width; ++j)
      if (unsigned(j) < count) to[j] = access.values[j];
  }
}

// The number of neighboring lanes that have the same sum after sum_over_lanes().
template <int count, int threads = int(warp_size)>
constexpr unsigned lanes_of_sum = unsigned(threads / count);

// Sums each of `count` values over the threads of a tile, in halves of the lanes. Afterwards lane j·lanes_of_sum and the
// lanes after it have the j-th sum in values[0]. In each round one half of the lanes continues with one half of the values
// and the other half with the rest, so that four sums take 6 exchanges instead of 20.
template <int threads, int count, class Real>
NNORM_DEVICE void sum_over_lanes(Real (&values)[count]) {
  static_assert((count & (count - 1)) == 0 && count <= threads, "a power of two");
  unsigned distance = unsigned(threads) / 2;
#pragma unroll
  for (int left = count / 2; left > 0; left /= 2, distance /= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const Real given = upper ? values[i] : values[i + left], own = upper ? values[i + left] : values[i];
      values[i] = own + __shfl_xor_sync(0xffffffffu, given, distance);
    }
  }
#pragma unroll
  for (; distance > 0; distance /= 2) values[0] += __shfl_xor_sync(0xffffffffu, values[0], distance);
}

// The sums over a tile: lane s·lanes_of_sum and the lanes after it get sum s.
template <class Part, int count>
NNORM_DEVICE auto sum_of_tile(Sums<Part, count>& sums) {
  static_assert(Part::places == 1 || Part::places == 2);
  auto& values = sums.of_thread();
  sum_over_lanes<Part::threads>(values);
  return Part::places == 2 ? values[0] + __shfl_xor_sync(0xffffffffu, values[0], unsigned(Part::threads) / 2) : values[0];
}

// Adds the sums of chains in halves; all threads get them. part(sum, chain) is the part of a sum that a chain has.
template <int chains, int count, class Real, class Part>
NNORM_DEVICE void add_chains(Real (&sums)[count], Part part) {
  static_assert((chains & (chains - 1)) == 0 && chains <= int(warp_size));
  constexpr int at_once = int(warp_size) / chains;
  const unsigned lane = threadIdx.x % warp_size;
#pragma unroll
  for (int first = 0; first < count; first += at_once) {
    const unsigned mine = unsigned(first) + lane / unsigned(chains);
    Real total = part(mine < unsigned(count) ? mine : 0, lane % unsigned(chains));
#pragma unroll
    for (unsigned distance = unsigned(chains) / 2; distance > 0; distance /= 2)
      total += __shfl_xor_sync(0xffffffffu, total, distance);
#pragma unroll
    for (int i = first; i < first + at_once && i < count; ++i)
      sums[i] = __shfl_sync(0xffffffffu, total, unsigned(i - first) * unsigned(chains));
  }
}

// Adds the sums of a block's chains; all threads of the block get them. Each call in a kernel has its own `turn` and with
// it its own shared memory, which is written again only after the barriers of the other turns.
//
// A thread for which `has_one` is true contributes `own`: the part of sum `sum` that belongs to chain `chain`. Only the
// first `present` chains have parts.
template <int turn, int chains, int count, class Real>
NNORM_DEVICE void sums_of_chains(Real own, unsigned sum, unsigned chain, bool has_one, Real (&sums)[count],
                                 unsigned present = unsigned(chains)) {
  static_assert(turn >= 0);
  __shared__ Real parts[count][chains];
  if (has_one) parts[sum][chain] = own;
  __syncthreads();
  add_chains<chains>(sums, [&](unsigned its_sum, unsigned its_chain) {
    const Real part = parts[its_sum][its_chain];
    return its_chain < present ? part : Real(0);
  });
}

constexpr unsigned tiles_of_cluster = most_blocks_of_cluster * unsigned(row_chains);
constexpr int turns_of_row = 4;

// The sums of the tiles of a cluster's row, which the warps of the cluster send to each of its blocks. A row has two or
// more turns, each with up to four sums. A warp that sends the sums of a turn has read those of the turn before; so no sum
// is overwritten that another warp has yet to read.
struct alignas(access_bytes) SumsOfCluster {
  Arrivals arrivals[turns_of_row];
  float parts[turns_of_row][4][tiles_of_cluster];
};

// The sums over a row of `tiles` tiles that a cluster computes, each warp one tile. Bit t of `parities` is the parity of
// the number of rows that have had turn t.
template <int turn, class Part, int count>
NNORM_DEVICE void sums_of_cluster(Sums<Part, count>& of_tile, SumsOfCluster& all, unsigned tiles, unsigned& parities,
                                  float (&sums)[count]) {
  static_assert(count <= 4 && turn < turns_of_row);
  constexpr unsigned apart = lanes_of_sum<Part::places * count>;
  const float own = sum_of_tile(of_tile);
  const unsigned lane = threadIdx.x % warp_size, warps = blockDim.x / warp_size, blocks = cluster_size();
  const unsigned tile = cluster_rank() * warps + threadIdx.x / warp_size;
  auto& parts = all.parts[turn];
  if (threadIdx.x == 0) expect(all.arrivals[turn], unsigned(count * sizeof(float)) * blocks * warps);
  if (lane < count * apart)
    for (unsigned rank = lane % apart; rank < blocks; rank += apart)
      send(own, parts[lane / apart][tile], all.arrivals[turn], rank);
  wait_for(all.arrivals[turn], parities >> turn & 1);
  parities ^= 1 << turn;
  add_chains<int(row_chains)>(sums, [&](unsigned sum, unsigned chain) {
    ChainSum<float> total{0, 0};
    for (unsigned its_tile = chain; its_tile < tiles; its_tile += unsigned(row_chains)) total.add(parts[sum][its_tile]);
    return total.total();
  });
}

// The sums over a row that `team` threads compute: a block, whose warp w has tile w, a warp, or a part of one.
template <int team, int turn, class Part, int count, class Real>
NNORM_DEVICE void sums_of_team(Sums<Part, count>& parts, Real (&sums)[count]) {
  constexpr int threads = Part::threads;
  constexpr unsigned apart = lanes_of_sum<Part::places * count, threads>;
  const Real own = sum_of_tile(parts);
  if constexpr (team > threads) {
    const unsigned lane = threadIdx.x % warp_size;
    sums_of_chains<turn, team / threads>(own, lane / apart, threadIdx.x / warp_size, lane % apart == 0 && lane < count * apart,
                                         sums, blockDim.x / warp_size);
  } else if constexpr (count > 1) {
#pragma unroll
    for (int s = 0; s < count; ++s) sums[s] = __shfl_sync(0xffffffffu, own, unsigned(s) * apart, threads);
  } else {
    sums[0] = own;  // as all of these threads have it
  }
}

// Whether it is so for one of the rows of a warp. If a warp or more has one row, all of its threads say the same.
template <int team>
NNORM_DEVICE bool for_any_row(bool it_is) {
  return team < int(warp_size) ? __any_sync(0xffffffffu, it_is) != 0 : it_is;
}

}  // namespace nnorm::cuda
