// Which kernel runs a problem, with how many threads.
#pragma once

#include <algorithm>
#include <iterator>

#include "nnorm/cuda_kernels.h"
#include "batch_normal_norm.cuh"
#include "layer_group_normal_norm.cuh"

namespace nnorm::cuda {

struct Device {
  int multiprocessors = 0, shared_memory = 0;  // shared memory that a block may have, in bytes

  static cudaError_t current(Device& device) {
    int ordinal = 0;
    if (const cudaError_t error = cudaGetDevice(&ordinal)) return error;
    if (const cudaError_t error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, ordinal))
      return error;
    return cudaDeviceGetAttribute(&device.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
  }

  // As many blocks as there is work for, and no more than so many for each multiprocessor: kernels loop over the rest.
  unsigned blocks(size_t wanted, unsigned most_of_multiprocessor) const {
    return unsigned(std::min(wanted, size_t(multiprocessors) * most_of_multiprocessor));
  }
};

#if defined(__CUDACC__)
// `most_shared` is what any launch of this kernel may ask for. The limit is one for all threads of the process, so each
// sets it to the same.
template <class Work>
cudaError_t launch(void (*kernel)(Work), dim3 blocks, unsigned threads, cudaStream_t stream, Work work, size_t shared = 0,
                   size_t most_shared = 0) {
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shared > 0)
    if (const cudaError_t error =
            cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(most_shared)))
      return error;
  void* arguments[] = {&work};
  return cudaLaunchKernel(function, blocks, threads, arguments, shared, stream);
}
#endif

constexpr size_t divided_up(size_t n, size_t by) { return (n + by - 1) / by; }

template <Epilogue epilogue, int width, class T>
cudaError_t run_rows(const ChannelProblem<T>& problem, const Device& device, cudaStream_t stream) {
  ChannelRows<T> work{};
  work.x = problem.x;
  work.residual = problem.residual;
  work.y = problem.y;
  std::copy_n(problem.parameters, std::size(problem.parameters), work.parameters.fields);
  work.rows = problem.samples * problem.channels;
  work.channels = problem.channels;
  work.extent = unsigned(problem.extent);
  work.lead = width == 1 ? 0 : unsigned(misalignment(problem.x));
  work.segments = unsigned(divided_up(accesses_of_row(problem.extent, width), accesses_of_segment));
  const size_t blocks = divided_up(work.rows * work.segments, channel_threads / warp_size);
  const bool exact = work.lead == 0 && problem.extent % width == 0;
  const auto kernel = exact ? &batch_normal_norm_rows<epilogue, true, width, T>
                            : &batch_normal_norm_rows<epilogue, width == 1, width, T>;  // never without, of width 1
  return launch(kernel, device.blocks(blocks, 16), channel_threads, stream, work);
}

template <Epilogue epilogue, bool padded, int width, class T>
cudaError_t run_columns(const ChannelProblem<T>& problem, size_t positions, const Device& device, cudaStream_t stream) {
  ChannelColumns<T> work{};
  work.x = problem.x;
  work.residual = problem.residual;
  work.y = problem.y;
  std::copy_n(problem.parameters, std::size(problem.parameters), work.parameters.fields);
  work.rows = problem.samples;
  work.columns = positions / width;
  work.extent = problem.extent;
  work.channels = problem.channels;
  const size_t column_blocks = divided_up(work.columns, channel_threads);
  work.span = unsigned(divided_up(work.columns, column_blocks));
  const size_t rows_of_block = channel_threads / work.span;
  // Each thread should have many rows, so that what it prepares pays, as long as the device stays full: 2 of these blocks
  // fit on a multiprocessor at once.
  const size_t row_blocks = divided_up(problem.samples, rows_of_block * in_flight);
  const size_t enough = divided_up(device.blocks(column_blocks * row_blocks, 4), column_blocks);
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
                     (epilogue != Epilogue::add_relu || lead == misalignment(problem.residual));
  if (lanes != 0) {
    const bool whole = alike && lead == 0 && lanes % width == 0;
    if (lanes != problem.channels)
      return whole ? run_columns<epilogue, true, width>(problem, lanes, device, stream)
                   : run_columns<epilogue, true, 1>(problem, lanes, device, stream);
    return whole ? run_columns<epilogue, false, width>(problem, lanes, device, stream)
                 : run_columns<epilogue, false, 1>(problem, lanes, device, stream);
  }
  // A warp's share of a row of this length is a whole segment, or no other sample shares what a thread prepares.
  constexpr size_t long_extent = accesses_of_segment * width;
  if (problem.extent >= long_extent || (problem.extent >= long_extent / 8 && problem.samples < 2 * in_flight))
    return alike ? run_rows<epilogue, width>(problem, device, stream) : run_rows<epilogue, 1>(problem, device, stream);
  const size_t positions = problem.channels * problem.extent;
  return alike && lead == 0 && positions % width == 0
             ? run_columns<epilogue, false, width>(problem, positions, device, stream)
             : run_columns<epilogue, false, 1>(problem, positions, device, stream);
}

template <class T>
cudaError_t run_any(const ChannelProblem<T>& problem, size_t lanes, cudaStream_t stream) {
  if (problem.size() == 0) return cudaSuccess;
  if (problem.extent >> 31 != 0) return cudaErrorInvalidValue;
  switch (problem.epilogue) {
    case Epilogue::none:
      return run_with<Epilogue::none>(problem, lanes, stream);
    case Epilogue::relu:
      return run_with<Epilogue::relu>(problem, lanes, stream);
    case Epilogue::add_relu:
      return run_with<Epilogue::add_relu>(problem, lanes, stream);
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t run(const ChannelProblem<T>& problem, cudaStream_t stream) {
  return run_any(problem, 0, stream);
}

template <class T>
cudaError_t run_channels_last(const ChannelProblem<T>& problem, size_t lanes, cudaStream_t stream) {
  if (problem.extent != 1 || lanes < problem.channels) return cudaErrorInvalidValue;
  return run_any(problem, lanes, stream);
}

// Rows that fit into the registers of `threads` threads with `values` each.
template <int threads, int values, int width, class T>
cudaError_t run_in_registers(const Rows<T>& work, const Device& device, cudaStream_t stream) {
  constexpr unsigned block = unsigned(block_of<threads>), teams = block / unsigned(threads);
  const unsigned blocks = device.blocks(divided_up(work.rows, teams), 64);
  if constexpr (width > 1)
    if (work.row_length == unsigned(threads * values) && work.whole_weights)
      return launch(&normal_norm_rows<threads, values, width, true, T>, blocks, block, stream, work);
  return launch(&normal_norm_rows<threads, values, width, false, T>, blocks, block, stream, work);
}

template <int width, class T>
cudaError_t run_rows(const Rows<T>& work, const Device& device, cudaStream_t stream) {
  if (work.row_length <= 32 * 8) return run_in_registers<32, 8, width>(work, device, stream);
  if (work.row_length <= 32 * 16) return run_in_registers<32, 16, width>(work, device, stream);
  if (work.row_length <= 32 * 24) return run_in_registers<32, 24, width>(work, device, stream);
  if (work.row_length <= 32 * 32) return run_in_registers<32, 32, width>(work, device, stream);
  if (work.row_length <= 128 * 32) return run_in_registers<128, 32, width>(work, device, stream);
  constexpr size_t scratch = 1 << 10;  // what the kernel itself keeps in shared memory, and a little more
  const size_t bytes = work.row_length * sizeof(T), room = size_t(device.shared_memory) - scratch;
  const unsigned blocks = device.blocks(work.rows, 16);
  if (bytes <= room)
    return launch(&normal_norm_long_rows<true, width, T>, blocks, long_row_threads, stream, work, bytes, room);
  return launch(&normal_norm_long_rows<false, width, T>, blocks, long_row_threads, stream, work);
}

// The greatest exponent by which no value of such a row brings 2^z to its limits: no standardised value is greater than
// the root of the row's length. Twice as much leaves room for rounding, unless rounding is all of the row's variance.
template <class Real>
Real bounded_exponent(size_t row_length) {
  const double greatest_log2 = std::log2(1 + 2 * std::sqrt(double(row_length)));
  return Real((double(Format<Real>::exponent_bias) - 2) / greatest_log2);
}

template <class T>
cudaError_t run(const RowProblem<T>& problem, cudaStream_t stream) {
  if (problem.rows == 0 || problem.row_length == 0) return cudaSuccess;
  if (problem.row_length >> 31 != 0) return cudaErrorInvalidValue;
  Device device;
  if (const cudaError_t error = Device::current(device)) return error;
  using Real = Arithmetic<T>;
  constexpr size_t width = widest<T>;
  const bool whole = misalignment(problem.x) == 0 && misalignment(problem.y) == 0 && problem.row_length % width == 0;
  const bool aligned_weights = misalignment(problem.weight) == 0 && misalignment(problem.bias) == 0;
  const Rows<T> work{problem.x,
                     problem.y,
                     problem.weight,
                     problem.bias,
                     problem.rows,
                     problem.period,
                     unsigned(problem.row_length),
                     unsigned(problem.run),
                     Divisor(unsigned(problem.run)),
                     problem.run == 1 && (!whole || aligned_weights),
                     Real(problem.epsilon),
                     Real(problem.delta),
                     Real(1) / Real(problem.row_length),
                     bounded_exponent<Real>(problem.row_length)};
  return whole ? run_rows<int(width)>(work, device, stream) : run_rows<1>(work, device, stream);
}

}  // namespace nnorm::cuda
