// Which kernel runs a problem, with how many threads.
#pragma once

#include <algorithm>
#include <iterator>

#include "nnorm/cuda_kernels.h"
#include "per_channel.cuh"
#include "per_row.cuh"

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

  // Enough blocks to fill the device several times over, and no more than there is work for: kernels loop over the rest.
  unsigned blocks(size_t wanted, unsigned threads) const {
    const size_t resident = size_t(multiprocessors) * (2048 / threads), most = 4 * resident;
    return unsigned(std::min(wanted, most));
  }
};

#if defined(__CUDACC__)
template <class Work>
cudaError_t launch(void (*kernel)(Work), dim3 blocks, unsigned threads, size_t shared, cudaStream_t stream, Work work) {
  const void* function = reinterpret_cast<const void*>(kernel);
  constexpr size_t without_asking = 48 << 10;
  if (shared > without_asking)
    if (const cudaError_t error =
            cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)))
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
  return launch(&batch_normal_norm_rows<epilogue, width, T>, device.blocks(blocks, channel_threads), channel_threads, 0,
                stream, work);
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
  // Each thread should have several rows, so that what it prepares pays, as long as the device stays full.
  const size_t row_blocks = divided_up(problem.samples, rows_of_block * in_flight);
  const size_t enough = divided_up(device.blocks(column_blocks * row_blocks, channel_threads), column_blocks);
  constexpr size_t most = 65535;  // blocks along y
  return launch(&batch_normal_norm_columns<epilogue, padded, width, T>,
                dim3(unsigned(column_blocks), unsigned(std::min({row_blocks, enough, most}))), channel_threads, 0,
                stream, work);
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

template <int width, class T>
cudaError_t run_rows(const Rows<T>& work, const Device& device, cudaStream_t stream) {
  const auto in_registers = [&](auto kernel, int threads) {
    const unsigned block = unsigned(std::max(threads, smallest_block));
    const size_t blocks = divided_up(work.rows, block / unsigned(threads));
    return launch(kernel, device.blocks(blocks, block), block, 0, stream, work);
  };
  if (work.row_length <= 32 * 8) return in_registers(&normal_norm_rows<32, 8, width, T>, 32);
  if (work.row_length <= 32 * 16) return in_registers(&normal_norm_rows<32, 16, width, T>, 32);
  if (work.row_length <= 32 * 24) return in_registers(&normal_norm_rows<32, 24, width, T>, 32);
  if (work.row_length <= 32 * 32) return in_registers(&normal_norm_rows<32, 32, width, T>, 32);
  if (work.row_length <= 128 * 32) return in_registers(&normal_norm_rows<128, 32, width, T>, 128);
  constexpr size_t reserved = 2 << 10;  // what the kernel itself keeps there, and the system
  const size_t bytes = work.row_length * sizeof(T);
  const unsigned blocks = device.blocks(work.rows, long_row_threads);
  if (bytes + reserved <= size_t(device.shared_memory))
    return launch(&normal_norm_long_rows<true, width, T>, blocks, long_row_threads, bytes, stream, work);
  return launch(&normal_norm_long_rows<false, width, T>, blocks, long_row_threads, 0, stream, work);
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
                     Real(problem.delta)};
  return whole ? run_rows<int(width)>(work, device, stream) : run_rows<1>(work, device, stream);
}

}  // namespace nnorm::cuda
