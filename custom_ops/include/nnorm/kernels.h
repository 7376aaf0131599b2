// The CPU kernels: a table of functions for each instruction set.
//
// A call computes the items [begin, end) of the count_items() items of a problem; callers distribute the items over
// threads. Only the sizes decide which elements an item has, so the result has the same bits for any number of threads.
// The output may overwrite the input or the residual, element for element. No function allocates, throws or blocks.
#pragma once

#include <cstddef>

#include "nnorm/problems.h"
#include "nnorm/quantized.h"
#include "nnorm/shared_rows.h"

namespace nnorm {

// The prepared parameters of the channels: one contiguous array for each field (prepare_channels).
enum class ChannelField { scale, shift, eta_pos, eta_neg, gain_pos, gain_neg, bias, count };

// Which parameters belong to an element. x is a sequence of rows; row r has the parameter set r mod `period`.
enum class Sharing {
  row,      // a row belongs to one channel: [N, C, extent]
  element,  // each element of a row has its own parameters: [N, C], or [N, C·extent] with each parameter repeated
  lane,     // element i of a row has the parameters of lane i mod `lanes`: [N, C/lanes, extent, lanes]
};

// A ChannelProblem with prepared parameters.
template <class T>
struct ChannelWork {
  const T* x;
  const T* residual;  // of x's shape, if the epilogue takes one
  T* y;
  const Arithmetic<T>* table;  // [ChannelField::count][table_width]
  size_t table_width;
  size_t size;        // elements of x
  size_t row_length;  // elements of a row
  size_t period;      // rows after which the parameters repeat
  size_t lanes;       // for Sharing::lane, 8 or 16
  Sharing sharing;
  Epilogue epilogue;
};

// Large enough to hide the cost of passing an item to a thread, small enough to distribute items evenly.
// BatchNormalNorm in float with AVX-512 computes an item in about 1 µs; every other kernel takes longer.
constexpr size_t elements_per_item = 4096;

template <class T>
size_t count_items(const ChannelWork<T>& work) {
  return (work.size + elements_per_item - 1) / elements_per_item;
}

template <class T>
size_t rows_per_item(const RowProblem<T>& work) {
  return work.row_length >= elements_per_item ? 1 : elements_per_item / (work.row_length ? work.row_length : 1);
}

template <class T>
size_t count_items(const RowProblem<T>& work) {
  const size_t rows = rows_per_item(work);
  return work.row_length ? (work.rows + rows - 1) / rows : 0;
}

template <class T>
struct KernelTable {
  void (*prepare_channels)(const Arithmetic<T>* const parameters[6], size_t channels, size_t repeat, Arithmetic<T>* table);
  void (*batch_normal_norm)(const ChannelWork<T>& work, size_t begin, size_t end);
  void (*layer_group_normal_norm)(const RowProblem<T>& work, size_t begin, size_t end);
  void (*shared_rows)(const SharedRows<T>& work, size_t begin, size_t end);  // one phase
  void (*end_of_phase)(const SharedRows<T>& work);                           // by one thread, after all items of the phase
};

struct QuantizedKernels {
  const char* extension;  // avx512vbmi if the kernels need this extension beyond the instruction set, else empty
  void (*table)(const QuantizedWork& work, size_t begin, size_t end);  // without a residual: looks up bytes
  void (*sum)(const QuantizedWork& work, size_t begin, size_t end);    // with a residual: adds it to steps
};

// The kernels of one instruction set.
struct InstructionSet {
  const char* name;  // avx512, avx2, neon, baseline
  KernelTable<float> float32;
  KernelTable<double> float64;
  KernelTable<Float16> float16;
  KernelTable<BFloat16> bfloat16;
  QuantizedKernels quantized;

  template <class T>
  const KernelTable<T>& table() const;
};

template <>
inline const KernelTable<float>& InstructionSet::table<float>() const {
  return float32;
}
template <>
inline const KernelTable<double>& InstructionSet::table<double>() const {
  return float64;
}
template <>
inline const KernelTable<Float16>& InstructionSet::table<Float16>() const {
  return float16;
}
template <>
inline const KernelTable<BFloat16>& InstructionSet::table<BFloat16>() const {
  return bfloat16;
}

// The instruction sets that this library was built for and this machine has, fastest first. The last element is
// nullptr.
const InstructionSet* const* instruction_sets();

inline const InstructionSet& best_instruction_set() { return **instruction_sets(); }

}  // namespace nnorm
