// How warps read, add and write the tiles of a row (nnorm/row_statistics.h).
#pragma once

#include "cluster.cuh"
#include "nnorm/row_statistics.h"

namespace nnorm::cuda {

// The part of a tile that a thread reads: `accesses` times `width` neighboring elements. Neighbor j belongs to sum j
// mod `places`, in the order of nnorm/row_statistics.h. If the device's approximate instructions compute ψ, a thread
// has one sum and reads 16 bytes at a time, which takes fewer instructions: ForHalf does not give the bits of a CPU in
// any order.
template <class T>
struct Tile {
  static constexpr int places = computed_by_device<T> ? 1 : int(lane_sums);
  static constexpr int width = computed_by_device<T> ? widest<T> : places;
  static constexpr int accesses = int(row_tile / tile_lanes) / width;

  // The position of a thread's first access to a tile, and the offset of access k from there: addresses with constant
  // offsets share their registers.
  static NNORM_DEVICE unsigned start(unsigned tile) {
    return tile * unsigned(row_tile) + threadIdx.x % warp_size * unsigned(width);
  }
  static constexpr NNORM_DEVICE unsigned offset(int k) { return unsigned(k) * warp_size * unsigned(width); }
};
static_assert(tile_lanes == warp_size);

// A thread's partial sums over a tile of its warp.
template <class T, int count>
struct Sums {
  static constexpr int places = Tile<T>::places;
  Arithmetic<T> values[places * count] = {};

  // The sums to which an element of an access is added.
  NNORM_DEVICE Arithmetic<T>* of(int element) { return values + element % Tile<T>::width % places * count; }
};

// Loads one access of a row of which `count` elements are left; elements after the end are 0. `whole` rows consist of
// whole accesses.
template <bool whole, class T>
NNORM_DEVICE Access<T, Tile<T>::width> load_part(const T* from, unsigned count) {
  constexpr int width = Tile<T>::width;
  if constexpr (whole) return load<width>(from);
  Access<T, width> access{};
#pragma unroll
  for (int j = 0; j < width; ++j)
    if (unsigned(j) < count) access.values[j] = from[j];
  return access;
}

template <bool whole, class T>
NNORM_DEVICE void store_part(T* to, const Access<T, Tile<T>::width>& access, unsigned count) {
  if constexpr (whole) {
    store_global(to, access);
  } else {
#pragma unroll
    for (int j = 0; j < Tile<T>::width; ++j)
      if (unsigned(j) < count) to[j] = access.values[j];
  }
}

// The number of neighboring lanes that have the same sum after sum_over_warp().
template <int count>
constexpr unsigned lanes_of_sum = warp_size / unsigned(count);

// Sums each of `count` values over a warp, in halves of the lanes. Afterwards lane j·lanes_of_sum and the lanes after
// it have the j-th sum in values[0]. In each round one half of the lanes continues with one half of the values and the
// other half with the rest, so that four sums take 6 exchanges instead of 20.
template <int count, class Real>
NNORM_DEVICE void sum_over_warp(Real (&values)[count]) {
  static_assert((count & (count - 1)) == 0 && count <= int(warp_size), "a power of two");
  unsigned distance = warp_size / 2;
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

// The sums over a row of `tiles` tiles that a cluster computes. Lane s·lanes_of_sum and the lanes after it have the part
// `own` of sum s. Bit t of `parities` is the parity of the number of rows that have had turn t.
template <int turn, int places, int count>
NNORM_DEVICE void sums_of_cluster(float own, SumsOfCluster& all, unsigned tiles, unsigned& parities, float (&sums)[count]) {
  static_assert(count <= 4 && turn < turns_of_row);
  constexpr unsigned apart = lanes_of_sum<places * count>;
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

// The sums over a tile: lane s·lanes_of_sum and the lanes after it get sum s. `values` are the partial sums of a lane,
// `places` of each sum, place by place.
template <int places, int all, class Real>
NNORM_DEVICE Real sum_of_tile(Real (&values)[all]) {
  static_assert(places == 1 || places == 2);
  sum_over_warp(values);
  return places == 2 ? values[0] + __shfl_xor_sync(0xffffffffu, values[0], warp_size / 2) : values[0];
}

// The sums over a row that a warp (chains = 1) or a block computes; warp w of the block has tile w.
template <int chains, int turn, int places, int count, class Real>
NNORM_DEVICE void sums_of_team(Real (&values)[places * count], Real (&sums)[count]) {
  constexpr unsigned apart = lanes_of_sum<places * count>;
  const Real own = sum_of_tile<places>(values);
  if constexpr (chains > 1) {
    const unsigned lane = threadIdx.x % warp_size;
    sums_of_chains<turn, chains>(own, lane / apart, threadIdx.x / warp_size, lane % apart == 0 && lane < count * apart, sums,
                                 blockDim.x / warp_size);
  } else if constexpr (places * count > 1) {
#pragma unroll
    for (int s = 0; s < count; ++s) sums[s] = __shfl_sync(0xffffffffu, own, unsigned(s) * apart);
  } else {
    sums[0] = own;
  }
}

}  // namespace nnorm::cuda
