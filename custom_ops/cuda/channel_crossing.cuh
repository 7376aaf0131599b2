// BatchNormalNorm of small tensors whose rows do not consist of whole accesses: a block computes neighboring accesses, and
// each element looks up its channel. Without a table, the block prepares the channels in shared memory while its loads are
// in flight.
#pragma once

#include "channel_access.cuh"

namespace nnorm::cuda {

template <class T>
struct ChannelCrossing : ChannelTensors<T> {
  unsigned accesses;  // of the tensor
  unsigned extent;    // neighboring positions of one channel
  unsigned channels;
  Divisor by_extent, by_channels;
};

// Channels that a block keeps. With accesses of one element each thread can have a channel of its own.
template <int width>
constexpr unsigned most_channels_of_crossing = width == 1 ? most_rows_of_block : 64;

constexpr int blocks_of_crossing = 6;  // of a multiprocessor
// With a residual, accesses of 16-bit numbers have registers for one less, and were still the fastest on an H200.
template <class T, bool residual>
constexpr int resident_of_crossing = sizeof(T) == 2 && residual ? blocks_of_crossing - 1 : blocks_of_crossing;

template <Epilogue epilogue, int width, class T>
__global__ void __launch_bounds__(channel_threads,
                                  blocks_at_once(resident_of_crossing<T, takes_residual<epilogue>>, channel_threads))
    batch_normal_norm_crossing(ChannelCrossing<T> w) {
  constexpr unsigned positions_of_block = channel_threads * width;
  const unsigned access = blockIdx.x * channel_threads + threadIdx.x;
  // Behind the end the last access is read again.
  const size_t position = size_t(access < w.accesses ? access : w.accesses - 1) * width;
  Elements<T, width> x = load_elements<width>(w.x + position), residual{};
  if (takes_residual<epilogue>) residual = load_elements<width>(w.residual + position);
  __shared__ Entry<T> prepared[most_channels_of_crossing<width>];  // for the rows of this block, in order
  const unsigned first = blockIdx.x * positions_of_block;
  const unsigned row = w.by_extent.divide(first), before = first - row * w.extent;
  const unsigned first_channel = row - w.by_channels.divide(row) * w.channels;
  const bool has_table = w.parameters.has_table();
  if (!has_table) {
    if (threadIdx.x <= w.by_extent.divide(before + positions_of_block - 1)) {
      const unsigned channel = first_channel + threadIdx.x;
      prepared[threadIdx.x] = {w.parameters.channel(channel - w.by_channels.divide(channel) * w.channels)};
    }
    __syncthreads();
  }
  if (access >= w.accesses) return;
  const unsigned own = before + threadIdx.x * width;
  const auto channel_of = [&](int j) {
    const unsigned its_row = w.by_extent.divide(own + unsigned(j));
    return has_table ? w.parameters.entry(first_channel + its_row).channel : prepared[its_row].channel;
  };
  store_global(w.y + position, results<T, epilogue, width>(x, residual, channel_of));
}

// Whether batch_normal_norm_crossing() takes a tensor at addresses that accesses of this width can have: whole accesses,
// few channels in a block, and no more blocks than run at once. More work is faster where a block does more of it.
template <int width, class T>
bool fits_crossing(const ChannelProblem<T>& problem, int multiprocessors) {
  const size_t size = problem.samples * problem.channels * problem.extent;
  const size_t at_once = size_t(multiprocessors) * blocks_of_crossing;
  return size % size_t(width) == 0 && size <= at_once * channel_threads * width && size >> 30 == 0 &&
         (width == 1 || channels_of_tile(channel_threads * width, problem.extent) <= most_channels_of_crossing<width>);
}

template <Epilogue epilogue, int width, class T>
cudaError_t run_crossing(const PreparedProblem<T>& problem, cudaStream_t stream) {
  const unsigned size = unsigned(problem.samples * problem.channels * problem.extent);
  const ChannelCrossing<T> work{tensors_of(problem),
                                size / unsigned(width),
                                unsigned(problem.extent),
                                unsigned(problem.channels),
                                Divisor(unsigned(problem.extent)),
                                Divisor(unsigned(problem.channels))};
  const unsigned blocks = unsigned(divided_up(work.accesses, channel_threads));
  return launch(&batch_normal_norm_crossing<epilogue, width, T>, blocks, channel_threads, stream, work);
}

}  // namespace nnorm::cuda
