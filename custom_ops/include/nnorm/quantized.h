// BatchNormalNorm between quantized tensors:
//
//   Y = quantize(epilogue(weight·ψ(scale·x + shift) + bias)),   x = (X − zero point of X)·scale of X
//
// or, in the place of an epilogue, with an activation, which costs nothing here: a table has it already.
//
// An element of Y depends on that element of X and its channel alone, so it is taken from a table with 256 entries for each
// channel. A sum with a residual is one of a table of numbers and the residual's, rounded afterwards. Tables are computed in
// float64 by the CPU kernels. Elements are bytes here; a table is made for their type, uint8 or int8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "nnorm/epilogues.h"
#include "nnorm/line_allocator.h"

namespace nnorm {

constexpr size_t entries = 256;  // of a channel's table, one for each byte

// The value of an element: (element − zero_point)·scale.
struct Quantization {
  float scale;
  int32_t zero_point;
  bool is_signed;

  int32_t least() const { return is_signed ? -128 : 0; }
  int32_t greatest() const { return is_signed ? 127 : 255; }
  int32_t element(size_t byte) const { return is_signed ? int32_t(int8_t(uint8_t(byte))) : int32_t(byte); }
};

// F(activation, name of its step, value). This list is the only one in C++; tests/test_quantized_batch_normal_norm.cpp has
// the formulas once more, and nnorm_export/domain/epilogues.py the bodies.
#define NNORM_FOR_EACH_ACTIVATION(F)                                             \
  F(hard_swish, HardSwish, y * std::fmin(std::fmax(y / 6 + 0.5, 0.0), 1.0)) \
  F(swish, Swish, y / (1 + std::exp(-y)))

#define NNORM_VALUE(activation, ...) activation,
enum class Activation { none, NNORM_FOR_EACH_ACTIVATION(NNORM_VALUE) };
#undef NNORM_VALUE

struct QuantizedNorm {
  Quantization x, y, residual;  // the residual's is unused where the epilogue takes none
  const float* parameters[6];   // scale, shift, exponent_pos, exponent_neg, weight, bias: [channels] each
  size_t channels;
  Epilogue epilogue;
  Activation activation;  // none where there is an epilogue
};

// How an element of Y is made of the steps of y, and of a residual's byte r: the sum of the steps and
// ((r ^ flip) − offset)·factor, clamped and rounded, plus the zero point.
struct QuantizedSum {
  int32_t flip;  // from int8 to uint8
  float offset, factor, least, greatest;
  int32_t zero_point;
};

// [channels][entries]; those of a channel begin with a line of the cache.
template <class T>
using Entries = std::vector<T, LineAllocator<T>>;

struct QuantizedTable {
  size_t channels = 0;
  Entries<uint8_t> bytes;  // the element of Y; empty with a residual
  Entries<float> steps;    // with a residual: y before the epilogue, in steps of Y
  QuantizedSum sum{};
};

// Why a norm with these scales has no table; empty if it has one.
std::string scale_refusal(const QuantizedNorm& norm);

// Makes the table of a norm whose scales are not refused. Returns the first channel with an entry that is not a number, or
// the number of channels if there is none. Allocates.
size_t make_table(const QuantizedNorm& norm, QuantizedTable& table);

// A call of the kernels. X is [samples, channels, extent]; an extent of 1 is a tensor with its channels last.
struct QuantizedWork {
  const uint8_t* x;
  const uint8_t* residual;
  uint8_t* y;
  const uint8_t* bytes;  // the table, or
  const float* steps;    // this one and
  QuantizedSum sum;
  size_t samples, channels, extent;

  NNORM_INLINE size_t size() const { return samples * channels * extent; }
};

// As elements_per_item of nnorm/kernels.h, for kernels that are 10 to 20 times as fast.
constexpr size_t bytes_per_item = 16384;

inline namespace NNORM_INSTRUCTION_SET {

// How a tensor with its channels last is divided: into columns of at most 64 channels, whose tables stay in the first-level
// cache, and those into rows. Of few channels a row is as many samples as fit into 64.
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

// What the items of a tensor with its channels last are: samples, and columns if the samples are few. A column's samples are
// lines of the cache, and so are its tables: of each channel one for each sample, or all.
struct ItemsOfColumns {
  size_t samples, columns, across;

  NNORM_INLINE ItemsOfColumns(const QuantizedWork& work, const Columns& all) {
    const size_t most = bytes_per_item / 64 * all.samples_of_a_row;
    samples = work.samples < most ? work.samples : most;
    constexpr size_t lines_of_a_table = entries / cache_line;
    const size_t lines = samples + 64 * (samples < lines_of_a_table ? samples : lines_of_a_table);
    columns = (most + lines - 1) / lines;
    columns = columns < all.count ? columns : all.count;
    across = (all.count + columns - 1) / columns;
  }
};

NNORM_INLINE size_t count_items(const QuantizedWork& work) {
  if (work.size() == 0) return 0;
  if (work.extent != 1) return (work.size() + bytes_per_item - 1) / bytes_per_item;
  const ItemsOfColumns item(work, Columns(work.channels));
  return (work.samples + item.samples - 1) / item.samples * item.across;
}

}  // namespace NNORM_INSTRUCTION_SET

}  // namespace nnorm
