// BatchNormalNorm between quantized tensors:
//
//   Y = quantize(epilogue(weight·ψ(scale·x + shift) + bias)),   x = (X − zero point of X)·scale of X
//
// or with an activation in place of the epilogue, which takes no time because the table contains it.
//
// An element of Y depends only on the same element of X and its channel, so it is looked up in a table with 256 entries
// for each channel. With a residual, the table holds numbers before rounding, to which the residual is added. The CPU
// kernels compute tables in float64. Elements are bytes here; a table is made for their type, uint8 or int8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "nnorm/epilogues.h"
#include "nnorm/line_allocator.h"

namespace nnorm {

constexpr size_t table_entries = 256;  // for each channel, one for each byte

// The value of an element: (element − zero_point)·scale.
struct Quantization {
  float scale;
  int32_t zero_point;
  bool is_signed;

  int32_t least() const { return is_signed ? -128 : 0; }
  int32_t greatest() const { return is_signed ? 127 : 255; }
  int32_t element(size_t byte) const { return is_signed ? int32_t(int8_t(uint8_t(byte))) : int32_t(byte); }
};

// F(activation, name in the operator's name, value). This list is the only one in C++; the formulas are also in
// tests/test_quantized_batch_normal_norm.cpp, and the bodies in nnorm_export/domain/epilogues.py.
#define NNORM_FOR_EACH_ACTIVATION(F)                                             \
  F(hard_swish, HardSwish, y * std::fmin(std::fmax(y / 6 + 0.5, 0.0), 1.0)) \
  F(swish, Swish, y / (1 + std::exp(-y)))

#define NNORM_VALUE(activation, ...) activation,
enum class Activation { none, NNORM_FOR_EACH_ACTIVATION(NNORM_VALUE) };
#undef NNORM_VALUE

struct QuantizedNorm {
  Quantization x, y, residual;  // the residual's is not used if the epilogue takes none
  const float* parameters[6];   // scale, shift, exponent_pos, exponent_neg, weight, bias: [channels] each
  size_t channels;
  Epilogue epilogue;
  Activation activation;  // none if there is an epilogue
};

// How an element of Y is computed from y in units of Y's scale (its steps) and the residual's byte r: the sum of the
// steps and ((r ^ sign_flip) − offset)·factor, clamped and rounded, plus the zero point.
struct QuantizedSum {
  int32_t sign_flip;  // 0x80 turns int8 into uint8; 0 keeps uint8
  float offset, factor, least, greatest;
  int32_t zero_point;
};

// [channels][table_entries]. The entries of a channel start at a cache line.
template <class T>
using Entries = std::vector<T, LineAllocator<T>>;

struct QuantizedTable {
  size_t channels = 0;
  Entries<uint8_t> bytes;  // without a residual: the elements of Y
  Entries<float> steps;    // with a residual: y before the epilogue, in units of Y's scale
  QuantizedSum sum{};
};

// Why the scales of a norm are refused; empty if they are valid.
std::string scale_refusal(const QuantizedNorm& norm);

// Makes the table of a norm whose scales are valid. Returns the first channel with an entry that is NaN, or the number
// of channels if no entry is NaN. Allocates memory.
size_t make_table(const QuantizedNorm& norm, QuantizedTable& table);

// The arguments of a kernel. X is [samples, channels, extent]; a tensor whose channels are last has an extent of 1.
struct QuantizedWork {
  const uint8_t* x;
  const uint8_t* residual;
  uint8_t* y;
  const uint8_t* bytes;  // the table without a residual
  const float* steps;    // the table with a residual
  QuantizedSum sum;      // used with `steps`
  size_t samples, channels, extent;

  NNORM_INLINE size_t size() const { return samples * channels * extent; }
};

// As elements_per_item in nnorm/kernels.h, for kernels that are 10 to 20 times as fast.
constexpr size_t bytes_per_item = 16384;

inline namespace NNORM_INSTRUCTION_SET {

// How a tensor whose channels are last is divided: into columns of at most 64 channels, whose tables fit into the
// first-level cache. A row is one sample, or as many samples as fit into 64 elements if the channels are few.
struct Columns {
  size_t samples_of_a_row, row_length, count;

  NNORM_INLINE explicit Columns(size_t channels)
      : samples_of_a_row(channels < 64 ? 64 / channels : 1),
        row_length(samples_of_a_row * channels),
        count((row_length + 63) / 64) {}
  NNORM_INLINE size_t begin(size_t column) const {
    const size_t width = row_length / count, wider = row_length % count;
    return column * width + (column < wider ? column : wider);
  }
};

// How a tensor whose channels are last is divided into items: by samples, and by columns too if the samples are few. An
// item reads a limited number of cache lines: one for each sample of a column, and the lines of the column's tables, of
// which a channel has at most one for each sample.
struct ItemsOfColumns {
  size_t samples, columns, column_groups;

  NNORM_INLINE ItemsOfColumns(const QuantizedWork& work, const Columns& all) {
    const size_t most = bytes_per_item / 64 * all.samples_of_a_row;
    samples = work.samples < most ? work.samples : most;
    constexpr size_t lines_of_a_table = table_entries / cache_line;
    const size_t lines = samples + 64 * (samples < lines_of_a_table ? samples : lines_of_a_table);
    columns = (most + lines - 1) / lines;
    columns = columns < all.count ? columns : all.count;
    column_groups = (all.count + columns - 1) / columns;
  }
};

NNORM_INLINE size_t count_items(const QuantizedWork& work) {
  if (work.size() == 0) return 0;
  if (work.extent != 1) return (work.size() + bytes_per_item - 1) / bytes_per_item;
  const ItemsOfColumns item(work, Columns(work.channels));
  return (work.samples + item.samples - 1) / item.samples * item.column_groups;
}

}  // namespace NNORM_INSTRUCTION_SET

}  // namespace nnorm
