// BatchNormalNorm: y = epilogue(weight·ψ(scale·x + shift) + bias) with frozen exponents, in one pass over x.
//
// A thread needs two divisions to prepare a channel. prepare() does it once for all runs, if the parameters are constants of
// a model; the kernels then read its table. Otherwise they prepare the channels: in `_tiles`, `_crossing` and `_columns` a
// block does it in shared memory, while its loads are in flight.
//
// There are four kernels, for different layouts. In `_tiles` an access has one channel; in `_crossing` each of its elements
// has its own. In `_columns` a thread computes the same neighboring positions, each of its own channel, in many samples. In
// `_rows` a warp computes a segment of one channel's extent. kernel_for() chooses one of them.
#pragma once

#include "channel_columns.cuh"
#include "channel_crossing.cuh"
#include "channel_rows.cuh"
#include "channel_tiles.cuh"

namespace nnorm::cuda {

// A kernel and the width of its accesses: as wide as it can be, or one element.
enum class ChannelKernel {
  large_tiles,
  small_tiles,
  crossing,
  crossing_elements,
  rows,
  rows_of_elements,
  columns,
  columns_of_elements
};

constexpr int width_of_crossing = 4;  // the best on an H200, for 16-bit numbers too

// The kernel for a tensor whose channels are not last. `alike`: x, y and the residual are equally far from a boundary.
template <bool residual, class T>
ChannelKernel kernel_for(const ChannelProblem<T>& problem, size_t lead, bool alike, int multiprocessors) {
  constexpr int many = accesses_of_large<T>, width = widest<T>;
  if (alike && fits_tiles<many>(problem, lead)) {  // at shorter rows columns are faster
    const size_t blocks = problem.samples * problem.channels * problem.extent / (size_t(width) * channel_threads * many);
    const bool is_large = blocks >= size_t(multiprocessors) * blocks_of_large<T, residual> * 2;
    return is_large ? ChannelKernel::large_tiles : ChannelKernel::small_tiles;
  }
  if constexpr (!std::is_same_v<T, double>) {
    if (fits_crossing<1>(problem, multiprocessors)) return ChannelKernel::crossing_elements;
    if (alike && lead % width_of_crossing == 0 && fits_crossing<width_of_crossing>(problem, multiprocessors))
      return ChannelKernel::crossing;
  }
  // Rows of this length fill the segment of a warp. Shorter rows are also faster with a warp each if there are few
  // samples that share the channels that a thread of run_columns() prepares.
  constexpr size_t long_extent = accesses_of_segment * width;
  const size_t positions = problem.channels * problem.extent;
  if (problem.extent >= long_extent || (problem.extent >= long_extent / 8 && problem.samples < 2 * in_flight) ||
      !fits_columns(positions, problem.extent))
    return alike ? ChannelKernel::rows : ChannelKernel::rows_of_elements;
  return has_whole_columns<T, residual>(positions, lead, alike) ? ChannelKernel::columns
                                                                : ChannelKernel::columns_of_elements;
}

template <Epilogue epilogue, class T>
cudaError_t run_with(const PreparedProblem<T>& problem, size_t lanes, cudaStream_t stream) {
  Device device;
  if (const cudaError_t error = Device::current(device)) return error;
  constexpr bool residual = takes_residual<epilogue>;
  const size_t lead = misalignment(problem.x);
  const bool alike = lead == misalignment(problem.y) && (!residual || lead == misalignment(problem.residual));
  constexpr int of_column = width_of_columns<T, residual>;
  if (lanes != 0) {
    const bool whole = has_whole_columns<T, residual>(lanes, lead, alike);
    if (lanes != problem.channels)
      return whole ? run_columns<epilogue, true, of_column>(problem, lanes, device, stream)
                   : run_columns<epilogue, true, 1>(problem, lanes, device, stream);
    return whole ? run_columns<epilogue, false, of_column>(problem, lanes, device, stream)
                 : run_columns<epilogue, false, 1>(problem, lanes, device, stream);
  }
  const size_t positions = problem.channels * problem.extent;
  switch (kernel_for<residual>(problem, lead, alike, device.multiprocessors)) {
    case ChannelKernel::large_tiles:
      return run_tiles<epilogue, accesses_of_large<T>, blocks_of_large<T, residual>>(problem, stream);
    case ChannelKernel::small_tiles:
      return run_tiles<epilogue, 1, blocks_of_small<T>>(problem, stream);
    case ChannelKernel::crossing:
      if constexpr (!std::is_same_v<T, double>) return run_crossing<epilogue, width_of_crossing>(problem, stream);
      break;
    case ChannelKernel::crossing_elements:
      if constexpr (!std::is_same_v<T, double>) return run_crossing<epilogue, 1>(problem, stream);
      break;
    case ChannelKernel::rows:
      return run_rows<epilogue, widest<T>>(problem, device, stream);
    case ChannelKernel::rows_of_elements:
      return run_rows<epilogue, 1>(problem, device, stream);
    case ChannelKernel::columns:
      return run_columns<epilogue, false, of_column>(problem, positions, device, stream);
    case ChannelKernel::columns_of_elements:
      return run_columns<epilogue, false, 1>(problem, positions, device, stream);
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t run_any(const PreparedProblem<T>& problem, size_t lanes, cudaStream_t stream) {
  if (problem.empty()) return cudaSuccess;
  if (problem.extent >> 31 != 0) return cudaErrorInvalidValue;
  cudaError_t error = cudaErrorInvalidValue;
  with_epilogue(problem.epilogue, [&](auto epilogue) {
    error = run_with<decltype(epilogue)::value>(problem, lanes, stream);
  });
  return error;
}

template <class T>
cudaError_t run(const ChannelProblem<T>& problem, cudaStream_t stream, bool same_bits, const void* table) {
  return with_elements(PreparedProblem<T>{problem, table}, same_bits,
                       [=](const auto& of_elements) { return run_any(of_elements, 0, stream); });
}

template <class T>
cudaError_t run_channels_last(const ChannelProblem<T>& problem, size_t lanes, cudaStream_t stream, bool same_bits,
                              const void* table) {
  if (problem.extent != 1 || lanes < problem.channels) return cudaErrorInvalidValue;
  return with_elements(PreparedProblem<T>{problem, table}, same_bits,
                       [=](const auto& of_elements) { return run_any(of_elements, lanes, stream); });
}

template <class T>
struct TableWork {
  ChannelParameters<T> parameters;
  Guarded<T>* table;
  size_t channels, entries;
};

template <class T>
__global__ void __launch_bounds__(channel_threads) batch_normal_norm_table(TableWork<T> w) {
  const size_t i = size_t(blockIdx.x) * channel_threads + threadIdx.x;
  if (i < w.entries) w.table[i] = Guarded<T>::of(w.parameters.channel(i % w.channels));
}

template <class T>
size_t table_size(const ChannelProblem<T>& problem) {
  return problem.channels == 0 ? 0 : sizeof(Guarded<T>) * entries_of_table(problem.channels);
}

template <class T>
cudaError_t prepare(const ChannelProblem<T>& problem, void* table, cudaStream_t stream, bool same_bits) {
  if (problem.channels == 0) return cudaSuccess;
  return with_elements(PreparedProblem<T>{problem, nullptr}, same_bits, [=](const auto& of_elements) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(of_elements.x)>>;
    static_assert(sizeof(Guarded<Element>) == sizeof(Guarded<T>));
    const TableWork<Element> work{parameters_of(of_elements), static_cast<Guarded<Element>*>(table), problem.channels,
                                  entries_of_table(problem.channels)};
    const unsigned blocks = unsigned(divided_up(work.entries, channel_threads));
    return launch(&batch_normal_norm_table<Element>, blocks, channel_threads, stream, work);
  });
}

}  // namespace nnorm::cuda
