// BatchNormalNorm of many samples: a thread computes the same neighboring positions, each of its own channel, in many.
#pragma once

#include "channel_access.cuh"

namespace nnorm::cuda {

template <class T>
struct ChannelColumns : ChannelTensors<T> {
  size_t rows, columns;  // a column is one access wide
  size_t extent;         // neighboring positions of one channel
  size_t channels;       // channels after these are padding
  unsigned span;         // columns of a block
  unsigned most_rows;    // of a thread; it has so many or one less
  Divisor by_extent{1};

  NNORM_DEVICE size_t channel_of(size_t position) const {
    return extent == 1 ? position : by_extent.divide(unsigned(position));
  }
};

// The best of the variants that were tried on an H200, for one type and with or without a residual. Accesses of 8 bytes
// leave registers for more warps. Where registers suffice for two batches of rows, a thread loads one while it computes
// the other.
template <class T, bool residual>
constexpr int width_of_columns = sizeof(T) == 8 ? 2 : sizeof(T) == 4 && residual ? 4 : int(8 / sizeof(T));
template <class T, int width>
constexpr int batch_of_columns = sizeof(T) == 4 && width == 4 ? 1 : 4;
template <class T, bool residual>
constexpr bool columns_load_ahead = sizeof(T) == 2 || (sizeof(T) == 4 && residual);
template <class T, bool residual, bool padded>
constexpr int blocks_of_columns = sizeof(T) == 8   ? 1
                                  : sizeof(T) == 2 ? (residual ? 2 : 3)
                                  : residual       ? (padded ? 3 : 4)
                                                   : 5;

// Accesses of a thread in neighboring rows of its own.
template <Epilogue epilogue, int width, class T>
struct RowBatch {
  static constexpr int most = batch_of_columns<T, width>;
  Elements<T, width> x[most], residual[most];

  NNORM_DEVICE void load(const ChannelTensors<T>& tensors, size_t first, size_t stride, unsigned count) {
#pragma unroll
    for (int k = 0; k < most; ++k) {
      if (unsigned(k) >= count) break;
      x[k] = load_elements<width>(tensors.x + (first + size_t(k) * stride));
      if (takes_residual<epilogue>) residual[k] = load_elements<width>(tensors.residual + (first + size_t(k) * stride));
    }
  }

  template <class ChannelOf, class IsPadding>
  NNORM_DEVICE void compute(T* y, size_t first, size_t stride, unsigned count, ChannelOf channel_of,
                            IsPadding is_padding) {
#pragma unroll
    for (int k = 0; k < most; ++k) {
      if (unsigned(k) >= count) break;
      store_global(y + (first + size_t(k) * stride),
                   results<T, epilogue, width>(x[k], residual[k], channel_of, is_padding));
    }
  }
};

template <Epilogue epilogue, bool padded, int width, class T>
__global__ void __launch_bounds__(channel_threads,
                                  blocks_at_once(blocks_of_columns<T, takes_residual<epilogue>, padded>, channel_threads))
    batch_normal_norm_columns(ChannelColumns<T> w) {
  using Batch = RowBatch<epilogue, width, T>;
  const unsigned rows_of_block = blockDim.x / w.span;
  const size_t column = size_t(blockIdx.x) * w.span + threadIdx.x % w.span;
  const size_t row = size_t(blockIdx.y) * rows_of_block + threadIdx.x / w.span, row_length = w.columns * width;
  const size_t step = size_t(gridDim.y) * rows_of_block, stride = step * row_length;
  const bool only_prepares = threadIdx.x >= rows_of_block * w.span || column >= w.columns || row >= w.rows;
  unsigned left = only_prepares ? 0 : w.most_rows - (row + (w.most_rows - 1) * step >= w.rows);
  size_t first = row * row_length + column * width;
  Batch batch;
  batch.load(w, first, stride, left);  // in flight while the channels are prepared

  __shared__ Entry<T> prepared[channel_threads * width];  // for the channels of this block's columns, in order
  const size_t begin = size_t(blockIdx.x) * w.span, first_channel = w.channel_of(begin * width);
  const bool has_table = w.parameters.has_table();
  if (!has_table) {
    const size_t end = begin + w.span < w.columns ? begin + w.span : w.columns;
    const unsigned needed = unsigned(w.channel_of(end * width - 1) - first_channel) + 1;
    // A thread prepares as many as an access has elements, at most. All are loaded before the first is prepared.
    LoadedChannel<T> loaded[width];
    const auto entry = [&](int k) { return threadIdx.x + unsigned(k) * blockDim.x; };
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const size_t channel = first_channel + entry(k);
      if (entry(k) < needed) loaded[k] = w.parameters.load(!padded || channel < w.channels ? channel : 0);
    }
#pragma unroll
    for (int k = 0; k < width; ++k)
      if (entry(k) < needed) prepared[entry(k)] = {loaded[k].prepared()};
    __syncthreads();
  }
  if (left == 0) return;
  Channel<Arithmetic<T>> channels[width];
  bool padding[width];
  size_t channel = w.channel_of(column * width), of_channel = column * width - channel * w.extent;
#pragma unroll
  for (int j = 0; j < width; ++j) {
    padding[j] = padded && channel >= w.channels;
    channels[j] = has_table ? w.parameters.entry(padding[j] ? 0 : channel).channel : prepared[channel - first_channel].channel;
    const bool next = ++of_channel == w.extent;
    channel += next;
    of_channel = next ? 0 : of_channel;
  }
  const auto channel_of = [&](int j) { return channels[j]; };
  const auto is_padding = [&](int j) { return padded && padding[j]; };
  while (true) {
    const unsigned after = left > Batch::most ? left - Batch::most : 0;
    const size_t next_first = first + Batch::most * stride;
    if constexpr (columns_load_ahead<T, takes_residual<epilogue>>) {
      Batch next;
      next.load(w, next_first, stride, after);
      batch.compute(w.y, first, stride, left, channel_of, is_padding);
      batch = next;
    } else {
      batch.compute(w.y, first, stride, left, channel_of, is_padding);
      batch.load(w, next_first, stride, after);
    }
    if (after == 0) return;
    left = after;
    first = next_first;
  }
}

// Whether batch_normal_norm_columns() can tell the channels of so many positions.
constexpr bool fits_columns(size_t positions, size_t extent) { return extent == 1 || positions >> 31 == 0; }

// Whether rows of so many positions consist of whole accesses of columns. `alike`: all tensors are equally far from a
// boundary.
template <class T, bool residual>
bool has_whole_columns(size_t positions, size_t lead, bool alike) {
  constexpr int width = width_of_columns<T, residual>;
  return alike && lead % width == 0 && positions % width == 0;
}

template <Epilogue epilogue, bool padded, int width, class T>
cudaError_t run_columns(const PreparedProblem<T>& problem, size_t positions, const Device& device, cudaStream_t stream) {
  ChannelColumns<T> work{};
  static_cast<ChannelTensors<T>&>(work) = tensors_of(problem);
  work.rows = problem.samples;
  work.columns = positions / width;
  work.extent = problem.extent;
  work.by_extent = Divisor(unsigned(problem.extent));
  work.channels = problem.channels;
  const size_t column_blocks = divided_up(work.columns, channel_threads);
  work.span = unsigned(divided_up(work.columns, column_blocks));
  const size_t rows_of_block = channel_threads / work.span;
  // All blocks run at once: a second wave would prepare the channels again. All threads have as many rows, or one less.
  const size_t row_blocks = divided_up(problem.samples, rows_of_block);
  constexpr unsigned at_once = unsigned(blocks_of_columns<T, takes_residual<epilogue>, padded>);
  const size_t enough = std::max<size_t>(device.blocks(column_blocks * row_blocks, at_once) / column_blocks, 1);
  constexpr size_t most = 65535;  // blocks along y
  work.most_rows = unsigned(divided_up(problem.samples, std::min({row_blocks, enough, most}) * rows_of_block));
  const dim3 blocks(unsigned(column_blocks), unsigned(divided_up(problem.samples, work.most_rows * rows_of_block)));
  const size_t threads = divided_up(rows_of_block * work.span, warp_size) * warp_size;
  return launch(&batch_normal_norm_columns<epilogue, padded, width, T>, blocks, unsigned(threads), stream, work);
}

}  // namespace nnorm::cuda
