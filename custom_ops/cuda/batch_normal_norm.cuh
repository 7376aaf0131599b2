// BatchNormalNorm: y = epilogue(weight·ψ(scale·x + shift) + bias) with frozen exponents, in one pass over x.
//
// Two kernels, for what a thread's channels cost it: two divisions each. `_rows`: a warp takes a piece of one channel's
// extent. `_columns`: a thread takes neighbouring positions of a sample, each with a channel of its own, in many samples.
#pragma once

#include "device.cuh"
#include "nnorm/channel.h"

namespace nnorm::cuda {

constexpr unsigned channel_threads = 256;
constexpr int in_flight = 4;  // accesses of a thread that are under way at once

template <class Real>
struct ChannelParameters {
  const Real* fields[ChannelProblem<Real>::parameter_count];

  template <class Evaluation>
  NNORM_DEVICE Channel<Real> prepared(size_t channel) const {
    return channel_from<Evaluation>(fields[0][channel], fields[1][channel], fields[2][channel], fields[3][channel],
                                    fields[4][channel], fields[5][channel]);
  }
};

template <Epilogue epilogue, class T>
NNORM_DEVICE Arithmetic<T> normalized(T x, T residual, const Channel<Arithmetic<T>>& channel) {
  using Real = Arithmetic<T>;
  Real h, integer, fraction;
  logarithm<Evaluation<T>>(widened(x), channel, h, integer, fraction);
  const Real added = epilogue == Epilogue::add_relu ? widened(residual) : Real(0);
  return power<Evaluation<T>, epilogue>(h, integer, fraction, added, channel);
}

template <class T>
struct ChannelRows {
  const T* x;
  const T* residual;
  T* y;
  ChannelParameters<Arithmetic<T>> parameters;
  size_t rows, channels;
  unsigned extent;
  unsigned lead;      // elements from a boundary of 16 bytes to x[0], the same for residual and y
  unsigned segments;  // of a row; a warp computes one after another
};

// Accesses that the elements of a row may touch, wherever it starts.
constexpr size_t accesses_of_row(size_t extent, int width) { return extent / size_t(width) + (width == 1 ? 0 : 2); }

constexpr unsigned accesses_of_segment = warp_size * in_flight;

// `exact` where rows start and end on boundaries of accesses.
template <Epilogue epilogue, bool exact, int width, class T>
__global__ void __launch_bounds__(channel_threads) batch_normal_norm_rows(ChannelRows<T> w) {
  using Real = Arithmetic<T>;
  constexpr unsigned warps_of_block = channel_threads / warp_size;
  const size_t warps = size_t(gridDim.x) * warps_of_block;
  const size_t first_item = size_t(blockIdx.x) * warps_of_block + threadIdx.x / warp_size;
  // Divisions of 64 bits are slow, so there is one for the first item and one for the steps, and none for the others.
  size_t row = first_item / w.segments, channel = row % w.channels;
  unsigned segment = unsigned(first_item % w.segments);
  const size_t row_step = warps / w.segments, channel_step = row_step % w.channels;
  const unsigned segment_step = unsigned(warps % w.segments);
  while (row < w.rows) {
    // Positions count from the last boundary before the row: its elements are those from begin to end.
    const size_t start = w.lead + row * w.extent;
    const unsigned begin = unsigned(start % width), end = begin + w.extent;
    const size_t origin = start - begin - w.lead;  // of position 0 in x; wraps where it is before x[0], and back again
    const unsigned first = (segment * accesses_of_segment + threadIdx.x % warp_size) * width;
    const auto position = [&](int k) { return first + unsigned(k) * warp_size * width; };
    const auto whole = [&](int k) {
      return exact ? position(k) < end : position(k) >= begin && position(k) + width <= end;
    };
    const auto each = [&](int k, auto f) {  // the elements of an access that reaches over the row's end or start
      for (unsigned j = 0; j < width; ++j)
        if (position(k) + j >= begin && position(k) + j < end) f(j, origin + position(k) + j);
    };
    Access<T, width> x[in_flight], residual[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (whole(k)) {
        x[k] = load<width>(w.x + (origin + position(k)));
        if (epilogue == Epilogue::add_relu) residual[k] = load<width>(w.residual + (origin + position(k)));
      } else {
        x[k] = residual[k] = {};
        if constexpr (!exact)
          each(k, [&](unsigned j, size_t i) {
            x[k].values[j] = w.x[i];
            if (epilogue == Epilogue::add_relu) residual[k].values[j] = w.residual[i];
          });
      }
    }
    const Channel<Real> of_row = w.parameters.template prepared<Evaluation<T>>(channel);  // while the loads are under way
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (position(k) >= end) continue;
      Real results[width];
#pragma unroll
      for (int j = 0; j < width; ++j) results[j] = normalized<epilogue>(x[k].values[j], residual[k].values[j], of_row);
      const Access<T, width> y = narrowed<T>(results);
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

template <class T>
struct ChannelColumns {
  const T* x;
  const T* residual;
  T* y;
  ChannelParameters<Arithmetic<T>> parameters;
  size_t rows, columns;  // columns in accesses
  size_t extent;         // neighbouring positions of one channel
  size_t channels;       // positions of channels beyond these are padding
  unsigned span;         // columns of a block
};

template <Epilogue epilogue, bool padded, int width, class T>
__global__ void __launch_bounds__(channel_threads) batch_normal_norm_columns(ChannelColumns<T> w) {
  using Real = Arithmetic<T>;
  const unsigned rows_of_block = blockDim.x / w.span;
  const size_t column = size_t(blockIdx.x) * w.span + threadIdx.x % w.span;
  if (threadIdx.x >= rows_of_block * w.span || column >= w.columns) return;
  const size_t step = size_t(gridDim.y) * rows_of_block, row_length = w.columns * width;
  size_t row = size_t(blockIdx.y) * rows_of_block + threadIdx.x / w.span;
  const auto has = [&](int k) { return row + size_t(k) * step < w.rows; };
  const auto position = [&](int k) { return (row + size_t(k) * step) * row_length + column * width; };
  Access<T, width> x[in_flight] = {}, residual[in_flight] = {};
  const auto load_rows = [&] {
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (!has(k)) break;
      x[k] = load<width>(w.x + position(k));
      if (epilogue == Epilogue::add_relu) residual[k] = load<width>(w.residual + position(k));
    }
  };
  load_rows();  // under way while the channels are prepared

  Channel<Real> channels[width];
  bool padding[width];
  size_t channel = column * width / w.extent, of_channel = column * width % w.extent;
#pragma unroll
  for (int j = 0; j < width; ++j) {
    padding[j] = padded && channel >= w.channels;
    channels[j] = w.parameters.template prepared<Evaluation<T>>(padding[j] ? 0 : channel);
    const bool next = ++of_channel == w.extent;
    channel += next;
    of_channel = next ? 0 : of_channel;
  }
  while (has(0)) {
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (!has(k)) break;
      Real results[width];
#pragma unroll
      for (int j = 0; j < width; ++j) {
        results[j] = normalized<epilogue>(x[k].values[j], residual[k].values[j], channels[j]);
        if (padding[j]) results[j] = 0;
      }
      store_global(w.y + position(k), narrowed<T>(results));
    }
    row += in_flight * step;
    load_rows();
  }
}

}  // namespace nnorm::cuda
