// BatchNormalNorm: y = epilogue(weight·ψ(scale·x + shift) + bias) with frozen exponents, in one pass over x.
//
// There are three kernels, because a thread needs two divisions to prepare a channel. In `_tiles` and `_columns` a block
// prepares the channels of its accesses in shared memory, while its loads are in flight. In `_tiles` its accesses are
// neighbors. In `_columns` a thread computes the same neighboring positions, each of its own channel, in many samples. In
// `_rows` a warp computes a segment of one channel's extent: it takes tensors whose rows do not consist of whole accesses.
// run_with() chooses one of them.
#pragma once

#include "launch.cuh"
#include "nnorm/channel.h"

namespace nnorm::cuda {

constexpr unsigned channel_threads = 256;
constexpr int in_flight = 4;  // accesses of a thread that are in flight together

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
  const Real added = takes_residual<epilogue> ? widened(residual) : Real(0);
  return power<Evaluation<T>, epilogue>(h, integer, fraction, added, channel);
}

// A channel in shared memory.
template <class Real>
struct alignas(16) Entry {
  Channel<Real> channel;
};

// What all kernels get.
template <class T>
struct ChannelTensors {
  const T* x;
  const T* residual;
  T* y;
  ChannelParameters<Arithmetic<T>> parameters;
};

template <class T>
ChannelTensors<T> tensors_of(const ChannelProblem<T>& problem) {
  ChannelTensors<T> tensors{problem.x, problem.residual, problem.y, {}};
  std::copy_n(problem.parameters, std::size(problem.parameters), tensors.parameters.fields);
  return tensors;
}

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
  using Real = Arithmetic<T>;
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
    Access<T, width> x[in_flight], residual[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (whole(k)) {
        x[k] = load<width>(w.x + (origin + position(k)));
        if (takes_residual<epilogue>) residual[k] = load<width>(w.residual + (origin + position(k)));
      } else {
        x[k] = residual[k] = {};
        if constexpr (!exact)
          each(k, [&](unsigned j, size_t i) {
            x[k].values[j] = w.x[i];
            if (takes_residual<epilogue>) residual[k].values[j] = w.residual[i];
          });
      }
    }
    const Channel<Real> of_row = w.parameters.template prepared<Evaluation<T>>(channel);  // while the loads are in flight
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
struct ChannelTiles : ChannelTensors<T> {
  unsigned accesses;    // of the tensor, below 2^31
  unsigned row_length;  // in accesses
  unsigned channels;
  Divisor by_row, by_channels;
};

constexpr unsigned most_channels_of_tile = 64;

// A block computes `own` neighboring accesses for each of its threads. An access lies in one row.
template <Epilogue epilogue, int own, int resident, class T>
__global__ void __launch_bounds__(channel_threads, blocks_at_once(resident, channel_threads))
    batch_normal_norm_tiles(ChannelTiles<T> w) {
  using Real = Arithmetic<T>;
  constexpr int width = widest<T>;
  const unsigned tile = blockIdx.x * (channel_threads * own), first = tile + threadIdx.x;
  const auto has = [&](int k) { return first + unsigned(k) * channel_threads < w.accesses; };
  // Behind the end the last access is read again, which saves a test of each load.
  const auto position = [&](int k) {
    const unsigned access = first + unsigned(k) * channel_threads;
    return size_t(access < w.accesses ? access : w.accesses - 1) * width;
  };
  Access<T, width> x[own], residual[own];
#pragma unroll
  for (int k = 0; k < own; ++k) {
    x[k] = load<width>(w.x + position(k));
    if (takes_residual<epilogue>) residual[k] = load<width>(w.residual + position(k));
  }
  __shared__ Entry<Real> entries[most_channels_of_tile];  // of the rows of this tile, in order
  const unsigned row = w.by_row.divide(tile), before = tile - row * w.row_length;
  if (threadIdx.x <= w.by_row.divide(before + channel_threads * own - 1)) {
    const unsigned its_row = row + threadIdx.x;
    entries[threadIdx.x] = {
        w.parameters.template prepared<Evaluation<T>>(its_row - w.by_channels.divide(its_row) * w.channels)};
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < own; ++k) {
    if (!has(k)) continue;
    const Channel<Real> channel = entries[w.by_row.divide(before + threadIdx.x + unsigned(k) * channel_threads)].channel;
    Real results[width];
#pragma unroll
    for (int j = 0; j < width; ++j) results[j] = normalized<epilogue>(x[k].values[j], residual[k].values[j], channel);
    store_global(w.y + position(k), narrowed<T>(results));
  }
}

template <class T>
struct ChannelColumns : ChannelTensors<T> {
  size_t rows, columns;  // a column is one access wide
  size_t extent;         // neighboring positions of one channel
  size_t channels;       // channels after these are padding
  unsigned span;         // columns of a block
};

// The best of the variants that were tried on an H200: accesses of 8 bytes leave registers for more warps.
template <class T>
constexpr int width_of_columns = sizeof(T) == 8 ? 2 : int(8 / sizeof(T));
template <class T>
constexpr int in_flight_of_columns = sizeof(T) == 2 ? 8 : in_flight;
template <class T, bool residual>
constexpr int blocks_of_columns = sizeof(T) == 8 ? 1 : sizeof(T) == 2 ? (residual ? 2 : 3) : (residual ? 4 : 5);

template <Epilogue epilogue, bool padded, int width, class T>
__global__ void __launch_bounds__(channel_threads,
                                  blocks_at_once(blocks_of_columns<T, takes_residual<epilogue>>, channel_threads))
    batch_normal_norm_columns(ChannelColumns<T> w) {
  using Real = Arithmetic<T>;
  constexpr int own = in_flight_of_columns<T>;
  const unsigned rows_of_block = blockDim.x / w.span;
  const size_t column = size_t(blockIdx.x) * w.span + threadIdx.x % w.span;
  const size_t step = size_t(gridDim.y) * rows_of_block, row_length = w.columns * width;
  size_t row = size_t(blockIdx.y) * rows_of_block + threadIdx.x / w.span;
  if (threadIdx.x >= rows_of_block * w.span || column >= w.columns) row = w.rows;  // it only prepares channels
  const auto has = [&](int k) { return row + size_t(k) * step < w.rows; };
  const auto position = [&](int k) { return (row + size_t(k) * step) * row_length + column * width; };
  Access<T, width> x[own] = {}, residual[own] = {};
  const auto load_rows = [&] {
#pragma unroll
    for (int k = 0; k < own; ++k) {
      if (!has(k)) break;
      x[k] = load<width>(w.x + position(k));
      if (takes_residual<epilogue>) residual[k] = load<width>(w.residual + position(k));
    }
  };
  load_rows();  // in flight while the channels are prepared

  __shared__ Entry<Real> entries[channel_threads * width];  // of the channels of this block's columns, in order
  const size_t begin = size_t(blockIdx.x) * w.span, end = begin + w.span < w.columns ? begin + w.span : w.columns;
  const size_t first = begin * width / w.extent;
  const unsigned needed = unsigned((end * width - 1) / w.extent - first) + 1;
  for (unsigned i = threadIdx.x; i < needed; i += blockDim.x)
    entries[i] = {w.parameters.template prepared<Evaluation<T>>(!padded || first + i < w.channels ? first + i : 0)};
  __syncthreads();
  if (row >= w.rows) return;
  Channel<Real> channels[width];
  bool padding[width];
  size_t channel = column * width / w.extent, of_channel = column * width % w.extent;
#pragma unroll
  for (int j = 0; j < width; ++j) {
    padding[j] = padded && channel >= w.channels;
    channels[j] = entries[channel - first].channel;
    const bool next = ++of_channel == w.extent;
    channel += next;
    of_channel = next ? 0 : of_channel;
  }
  while (has(0)) {
#pragma unroll
    for (int k = 0; k < own; ++k) {
      if (!has(k)) break;
      Real results[width];
#pragma unroll
      for (int j = 0; j < width; ++j) {
        results[j] = normalized<epilogue>(x[k].values[j], residual[k].values[j], channels[j]);
        if (padding[j]) results[j] = 0;
      }
      store_global(w.y + position(k), narrowed<T>(results));
    }
    row += own * step;
    load_rows();
  }
}

template <Epilogue epilogue, int width, class T>
cudaError_t run_rows(const ChannelProblem<T>& problem, const Device& device, cudaStream_t stream) {
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

// The channels of a tile that begins anywhere in a row.
constexpr size_t channels_of_tile(size_t accesses, size_t row_length) { return divided_up(accesses - 1, row_length) + 1; }

// Whether batch_normal_norm_tiles() takes the tensor: whole accesses, not too many, and not too many channels in a tile.
template <int own, class T>
bool fits_tiles(const ChannelProblem<T>& problem, size_t lead) {
  constexpr size_t width = size_t(widest<T>);
  return lead == 0 && problem.extent % width == 0 && (problem.samples * problem.channels * problem.extent / width) >> 31 == 0 &&
         channels_of_tile(channel_threads * own, problem.extent / width) <= most_channels_of_tile;
}

// Measured on an H200 (results/benchmarks_gpu.md): many accesses a thread for large tensors, one for small ones, which
// have too few blocks otherwise.
template <class T>
constexpr int accesses_of_large = sizeof(T) == 4 ? 4 : 2;
template <class T, bool residual>
constexpr int blocks_of_large = sizeof(T) == 8 ? 1 : residual ? 3 : 4;
template <class T>
constexpr int blocks_of_small = sizeof(T) == 8 ? 1 : computed_by_device<T> ? 5 : 6;

template <Epilogue epilogue, int own, int resident, class T>
cudaError_t run_tiles(const ChannelProblem<T>& problem, cudaStream_t stream) {
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

template <Epilogue epilogue, bool padded, int width, class T>
cudaError_t run_columns(const ChannelProblem<T>& problem, size_t positions, const Device& device, cudaStream_t stream) {
  ChannelColumns<T> work{};
  static_cast<ChannelTensors<T>&>(work) = tensors_of(problem);
  work.rows = problem.samples;
  work.columns = positions / width;
  work.extent = problem.extent;
  work.channels = problem.channels;
  const size_t column_blocks = divided_up(work.columns, channel_threads);
  work.span = unsigned(divided_up(work.columns, column_blocks));
  const size_t rows_of_block = channel_threads / work.span;
  // All blocks run at once: a second wave would prepare the channels again.
  const size_t row_blocks = divided_up(problem.samples, rows_of_block);
  constexpr unsigned at_once = unsigned(blocks_of_columns<T, takes_residual<epilogue>>);
  const size_t enough = std::max<size_t>(device.blocks(column_blocks * row_blocks, at_once) / column_blocks, 1);
  constexpr size_t most = 65535;  // blocks along y
  const dim3 blocks(unsigned(column_blocks), unsigned(std::min({row_blocks, enough, most})));
  const size_t threads = divided_up(rows_of_block * work.span, warp_size) * warp_size;
  return launch(&batch_normal_norm_columns<epilogue, padded, width, T>, blocks, unsigned(threads), stream, work);
}

template <Epilogue epilogue, class T>
cudaError_t run_with(const ChannelProblem<T>& problem, size_t lanes, cudaStream_t stream) {
  Device device;
  if (const cudaError_t error = Device::current(device)) return error;
  constexpr int width = widest<T>;
  const size_t lead = misalignment(problem.x);
  const bool alike = lead == misalignment(problem.y) &&
                     (!takes_residual<epilogue> || lead == misalignment(problem.residual));
  constexpr int of_column = width_of_columns<T>;
  const auto whole_columns = [&](size_t positions) {
    return alike && lead % of_column == 0 && positions % of_column == 0;
  };
  if (lanes != 0) {
    if (lanes != problem.channels)
      return whole_columns(lanes) ? run_columns<epilogue, true, of_column>(problem, lanes, device, stream)
                                  : run_columns<epilogue, true, 1>(problem, lanes, device, stream);
    return whole_columns(lanes) ? run_columns<epilogue, false, of_column>(problem, lanes, device, stream)
                                : run_columns<epilogue, false, 1>(problem, lanes, device, stream);
  }
  constexpr int many = accesses_of_large<T>;
  if (alike && fits_tiles<many>(problem, lead)) {
    constexpr int blocks_of_many = blocks_of_large<T, takes_residual<epilogue>>;
    const size_t blocks = problem.samples * problem.channels * problem.extent / (size_t(width) * channel_threads * many);
    return blocks >= size_t(device.multiprocessors) * blocks_of_many * 2
               ? run_tiles<epilogue, many, blocks_of_many>(problem, stream)
               : run_tiles<epilogue, 1, blocks_of_small<T>>(problem, stream);
  }
  // Rows of this length fill the segment of a warp. Shorter rows are also faster with a warp each if there are few
  // samples that share the channels that a thread of run_columns() prepares.
  constexpr size_t long_extent = accesses_of_segment * width;
  if (problem.extent >= long_extent || (problem.extent >= long_extent / 8 && problem.samples < 2 * in_flight))
    return alike ? run_rows<epilogue, width>(problem, device, stream) : run_rows<epilogue, 1>(problem, device, stream);
  const size_t positions = problem.channels * problem.extent;
  return whole_columns(positions) ? run_columns<epilogue, false, of_column>(problem, positions, device, stream)
                                  : run_columns<epilogue, false, 1>(problem, positions, device, stream);
}

template <class T>
cudaError_t run_any(const ChannelProblem<T>& problem, size_t lanes, cudaStream_t stream) {
  if (problem.empty()) return cudaSuccess;
  if (problem.extent >> 31 != 0) return cudaErrorInvalidValue;
  cudaError_t error = cudaErrorInvalidValue;
  with_epilogue(problem.epilogue, [&](auto epilogue) {
    error = run_with<decltype(epilogue)::value>(problem, lanes, stream);
  });
  return error;
}

template <class T>
cudaError_t run(const ChannelProblem<T>& problem, cudaStream_t stream, bool same_bits) {
  return with_elements(problem, same_bits, [=](const auto& of_elements) { return run_any(of_elements, 0, stream); });
}

template <class T>
cudaError_t run_channels_last(const ChannelProblem<T>& problem, size_t lanes, cudaStream_t stream, bool same_bits) {
  if (problem.extent != 1 || lanes < problem.channels) return cudaErrorInvalidValue;
  return with_elements(problem, same_bits, [=](const auto& of_elements) { return run_any(of_elements, lanes, stream); });
}

}  // namespace nnorm::cuda
