// BatchNormalNorm of tensors whose rows do not consist of whole accesses, or lie at odd addresses: a warp computes a
// segment of one channel's extent.
#pragma once

#include "channel_access.cuh"

namespace nnorm::cuda {

constexpr int in_flight = 4;  // accesses of a thread that are in flight together

template <class T>
struct ChannelRows : ChannelTensors<T> {
  size_t rows, channels;
  unsigned extent;
  unsigned lead;      // elements from the last 16-byte boundary to x[0], the same for residual and y
  unsigned segments;  // of a row; a warp computes one at a time
};

// The greatest number of accesses that a row needs, wherever it starts.
constexpr size_t accesses_of_row(size_t extent, int width) { return extent / size_t(width) + (width == 1 ? 0 : 2); }

constexpr unsigned accesses_of_segment = warp_size * in_flight;

template <Epilogue epilogue, int width, class T>
__global__ void __launch_bounds__(channel_threads) batch_normal_norm_rows(ChannelRows<T> w) {
  constexpr bool exact = width == 1;  // rows start and end on access boundaries
  constexpr unsigned warps_of_block = channel_threads / warp_size;
  const size_t warps = size_t(gridDim.x) * warps_of_block;
  const size_t first_item = size_t(blockIdx.x) * warps_of_block + threadIdx.x / warp_size;
  // 64-bit divisions are slow, so they compute only the first item and the steps; the loop adds the steps.
  size_t row = first_item / w.segments, channel = row % w.channels;
  unsigned segment = unsigned(first_item % w.segments);
  const size_t row_step = warps / w.segments, channel_step = row_step % w.channels;
  const unsigned segment_step = unsigned(warps % w.segments);
  while (row < w.rows) {
    // Positions are counted from the last access boundary at or before the start of the row: the row is [begin, end).
    const size_t start = w.lead + row * w.extent;
    const unsigned begin = unsigned(start % width), end = begin + w.extent;
    // The index of position 0 in x. It wraps if position 0 is before x[0], and wraps back when a position is added.
    const size_t origin = start - begin - w.lead;
    const unsigned first = (segment * accesses_of_segment + threadIdx.x % warp_size) * width;
    const auto position = [&](int k) { return first + unsigned(k) * warp_size * width; };
    const auto whole = [&](int k) {
      return exact ? position(k) < end : position(k) >= begin && position(k) + width <= end;
    };
    const auto each = [&](int k, auto f) {  // calls f for the elements of an access that crosses the start or end of the row
      for (unsigned j = 0; j < width; ++j)
        if (position(k) + j >= begin && position(k) + j < end) f(j, origin + position(k) + j);
    };
    Separate<T, width> x[in_flight], residual[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (whole(k)) {
        x[k] = {load<width>(w.x + (origin + position(k)))};
        if (takes_residual<epilogue>) residual[k] = {load<width>(w.residual + (origin + position(k)))};
      } else {
        x[k] = residual[k] = {};
        if constexpr (!exact)
          each(k, [&](unsigned j, size_t i) {
            x[k].values[j] = w.x[i];
            if (takes_residual<epilogue>) residual[k].values[j] = w.residual[i];
          });
      }
    }
    // While the loads are in flight.
    const Channel<Arithmetic<T>> of_row =
        w.parameters.has_table() ? w.parameters.entry(channel).channel : w.parameters.channel(channel);
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (position(k) >= end) continue;
      const Access<T, width> y = results<T, epilogue, width>(x[k], residual[k], [&](int) { return of_row; });
      if (exact || whole(k))
        store_global(w.y + (origin + position(k)), y);
      else if constexpr (!exact)
        each(k, [&](unsigned j, size_t i) { w.y[i] = y.values[j]; });
    }
    segment += segment_step;
    const bool next_row = segment >= w.segments;
    segment -= next_row ? w.segments : 0;
    row += row_step + next_row;
    channel += channel_step + next_row;
    channel -= channel >= w.channels ? w.channels : 0;
  }
}

template <Epilogue epilogue, int width, class T>
cudaError_t run_rows(const PreparedProblem<T>& problem, const Device& device, cudaStream_t stream) {
  ChannelRows<T> work{};
  static_cast<ChannelTensors<T>&>(work) = tensors_of(problem);
  work.rows = problem.samples * problem.channels;
  work.channels = problem.channels;
  work.extent = unsigned(problem.extent);
  work.lead = width == 1 ? 0 : unsigned(misalignment(problem.x));
  work.segments = unsigned(divided_up(accesses_of_row(problem.extent, width), accesses_of_segment));
  const size_t blocks = divided_up(work.rows * work.segments, channel_threads / warp_size);
  return launch(&batch_normal_norm_rows<epilogue, width, T>, device.blocks(blocks, 16), channel_threads, stream, work);
}

}  // namespace nnorm::cuda
