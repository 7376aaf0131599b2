// BatchNormalNorm of tensors whose rows consist of whole accesses: a block computes neighboring accesses. Without a table,
// the block prepares their channels in shared memory while its loads are in flight.
#pragma once

#include "channel_access.cuh"

namespace nnorm::cuda {

template <class T>
struct ChannelTiles : ChannelTensors<T> {
  unsigned accesses;    // of the tensor, below 2^31
  unsigned row_length;  // in accesses
  unsigned channels;
  Divisor by_row, by_channels;
};

constexpr unsigned most_channels_of_tile = 64;
static_assert(most_channels_of_tile <= most_rows_of_block);

// A block computes `own` neighboring accesses for each of its threads. An access lies in one row.
template <Epilogue epilogue, int own, int resident, class T>
__global__ void __launch_bounds__(channel_threads, blocks_at_once(resident, channel_threads))
    batch_normal_norm_tiles(ChannelTiles<T> w) {
  constexpr int width = widest<T>;
  const unsigned tile = blockIdx.x * (channel_threads * own), first = tile + threadIdx.x;
  const auto has = [&](int k) { return first + unsigned(k) * channel_threads < w.accesses; };
  // Behind the end the last access is read again, which saves a test of each load.
  const auto position = [&](int k) {
    const unsigned access = first + unsigned(k) * channel_threads;
    return size_t(access < w.accesses ? access : w.accesses - 1) * width;
  };
  Elements<T, width> x[own], residual[own] = {};
#pragma unroll
  for (int k = 0; k < own; ++k) {
    x[k] = load_elements<width>(w.x + position(k));
    if (takes_residual<epilogue>) residual[k] = load_elements<width>(w.residual + position(k));
  }
  __shared__ Guarded<T> prepared[most_channels_of_tile];  // for the rows of this tile, in order
  const unsigned row = w.by_row.divide(tile), before = tile - row * w.row_length;
  const unsigned first_channel = row - w.by_channels.divide(row) * w.channels;
  const bool has_table = w.parameters.has_table();
  if (!has_table) {
    if (threadIdx.x <= w.by_row.divide(before + channel_threads * own - 1)) {
      const unsigned channel = first_channel + threadIdx.x;
      prepared[threadIdx.x] = Guarded<T>::of(w.parameters.channel(channel - w.by_channels.divide(channel) * w.channels));
    }
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < own; ++k) {
    if (!has(k)) continue;
    const unsigned its_row = w.by_row.divide(before + threadIdx.x + unsigned(k) * channel_threads);
    const Guarded<T> channel = has_table ? w.parameters.entry(first_channel + its_row) : prepared[its_row];
    guarded_results<epilogue>(x[k], residual[k], channel,
                              [&](const Access<T, width>& y) { store_global(w.y + position(k), y); });
  }
}

// Whether batch_normal_norm_tiles() takes the tensor: whole accesses, not too many, and not too many channels in a tile.
template <int own, class T>
bool fits_tiles(const ChannelProblem<T>& problem, size_t lead) {
  constexpr size_t width = size_t(widest<T>);
  const size_t accesses = problem.samples * problem.channels * problem.extent / width;
  return lead == 0 && problem.extent % width == 0 && accesses >> 31 == 0 &&
         channels_of_tile(channel_threads * own, problem.extent / width) <= most_channels_of_tile;
}

// Measured on an H200 (results/benchmarks_gpu.md): many accesses a thread for large tensors, one for small ones, which
// have too few blocks otherwise.
template <class T>
constexpr int accesses_of_large = sizeof(T) == 4 ? 4 : 2;
template <class T, bool residual>
constexpr int blocks_of_large = sizeof(T) == 8 ? 1 : residual ? 3 : computed_by_device<T> ? 5 : 4;
template <class T>
constexpr int blocks_of_small = sizeof(T) == 8 ? 1 : computed_by_device<T> ? 5 : 6;

template <Epilogue epilogue, int own, int resident, class T>
cudaError_t run_tiles(const PreparedProblem<T>& problem, cudaStream_t stream) {
  const unsigned row_length = unsigned(problem.extent / size_t(widest<T>));
  const ChannelTiles<T> work{tensors_of(problem),
                             unsigned(problem.samples * problem.channels) * row_length,
                             row_length,
                             unsigned(problem.channels),
                             Divisor(row_length),
                             Divisor(unsigned(problem.channels))};
  const unsigned blocks = unsigned(divided_up(work.accesses, channel_threads * own));
  return launch(&batch_normal_norm_tiles<epilogue, own, resident, T>, blocks, channel_threads, stream, work);
}

}  // namespace nnorm::cuda
