// BatchNormalNorm between quantized tensors: looks up the bytes of Y in tables (nnorm/quantized.h).
//
// A table of 256 bytes fits into the registers of AVX-512 and NEON, whose permutations look up 64 or 16 elements at a
// time. AVX2 needs 16 shuffles. If the channels are last, each element of a vector has its own table: AVX-512
// transposes blocks of at most 64 samples and 64 channels, looks them up, and transposes them back.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "nnorm/kernels.h"
#include "prefetch.h"
#include "processor.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

// Looks up n elements of one channel.
NNORM_INLINE void look_up_each(const uint8_t* table, const uint8_t* x, uint8_t* y, size_t n) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const uint8_t a = table[x[i]], b = table[x[i + 1]], c = table[x[i + 2]], d = table[x[i + 3]];
    y[i] = a, y[i + 1] = b, y[i + 2] = c, y[i + 3] = d;
  }
  for (; i < n; ++i) y[i] = table[x[i]];
}

// Looks up samples whose channels are last: samples are `stride` elements apart, the tables of the `width` channels are
// contiguous.
NNORM_INLINE void look_up_last_each(const uint8_t* tables, size_t width, const uint8_t* x, uint8_t* y, size_t samples,
                                    size_t stride) {
  for (size_t s = 0; s < samples; ++s, x += stride, y += stride) {
    size_t c = 0;
    for (; c + 4 <= width; c += 4) {
      const uint8_t* t = tables + c * table_entries;
      const uint8_t a0 = t[x[c]], a1 = t[table_entries + x[c + 1]];
      const uint8_t a2 = t[2 * table_entries + x[c + 2]], a3 = t[3 * table_entries + x[c + 3]];
      y[c] = a0, y[c + 1] = a1, y[c + 2] = a2, y[c + 3] = a3;
    }
    for (; c < width; ++c) y[c] = tables[c * table_entries + x[c]];
  }
}

#if defined(__AVX512BW__)
#define NNORM_VBMI __attribute__((target("avx512vbmi")))

struct VbmiTable {
  __m512i quarter[4];
};

NNORM_VBMI NNORM_INLINE VbmiTable vbmi_table(const uint8_t* table) {
  return {_mm512_loadu_si512(table), _mm512_loadu_si512(table + 64), _mm512_loadu_si512(table + 128),
          _mm512_loadu_si512(table + 192)};
}

NNORM_VBMI NNORM_INLINE __m512i look_up_vbmi(__m512i x, const VbmiTable& table) {
  const __m512i low = _mm512_permutex2var_epi8(table.quarter[0], x, table.quarter[1]);
  const __m512i high = _mm512_permutex2var_epi8(table.quarter[2], x, table.quarter[3]);
  return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(x), high);
}

NNORM_INLINE __mmask64 first_lanes(size_t n) { return n >= 64 ? ~__mmask64(0) : (__mmask64(1) << n) - 1; }

NNORM_VBMI inline void look_up_vbmi_row(const uint8_t* table, const uint8_t* x, uint8_t* y, size_t n) {
  const VbmiTable quarters = vbmi_table(table);
  size_t i = 0;
  for (; i + 64 <= n; i += 64) _mm512_storeu_si512(y + i, look_up_vbmi(_mm512_loadu_si512(x + i), quarters));
  if (i == n) return;
  const __mmask64 rest = first_lanes(n - i);
  _mm512_mask_storeu_epi8(y + i, rest, look_up_vbmi(_mm512_maskz_loadu_epi8(rest, x + i), quarters));
}

// Transposes each lane of 16 registers, 16 by 16 bytes: the byte j of rows[i] becomes the byte i of rows[j].
NNORM_VBMI NNORM_INLINE void transpose_lanes(__m512i* rows) {
  __m512i halves[16];
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 8; ++i) {
      halves[2 * i] = _mm512_unpacklo_epi8(rows[i], rows[i + 8]);
      halves[2 * i + 1] = _mm512_unpackhi_epi8(rows[i], rows[i + 8]);
    }
    for (int i = 0; i < 8; ++i) {
      rows[2 * i] = _mm512_unpacklo_epi8(halves[i], halves[i + 8]);
      rows[2 * i + 1] = _mm512_unpackhi_epi8(halves[i], halves[i + 8]);
    }
  }
}

// A register of lane(0), …, lane(3), each loaded from memory: processors execute more loads in a cycle than shuffles.
template <class Lane>
NNORM_VBMI NNORM_INLINE __m512i four_lanes(Lane lane) {
  __m512i lanes = _mm512_castsi128_si512(lane(0));
  lanes = _mm512_mask_broadcast_i32x4(lanes, 0x00f0, lane(1));
  lanes = _mm512_mask_broadcast_i32x4(lanes, 0x0f00, lane(2));
  return _mm512_mask_broadcast_i32x4(lanes, 0xf000, lane(3));
}

NNORM_VBMI NNORM_INLINE __m128i load_lane(const uint8_t* x) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x)); }

// Loads 16 samples, from `first` on, of all channels of a block [64 channels][64 samples].
NNORM_VBMI NNORM_INLINE void load_samples(const uint8_t* block, size_t first, __m512i* rows) {
  for (size_t i = 0; i < 16; ++i)
    rows[i] = four_lanes([=](size_t lane) NNORM_VBMI { return load_lane(block + (i + 16 * lane) * 64 + first); });
  transpose_lanes(rows);
}

// Looks up 64 rows of 64 elements. Rows are `stride` elements apart.
NNORM_VBMI NNORM_INLINE void look_up_vbmi_block(const uint8_t* tables, const uint8_t* x, uint8_t* y, size_t stride) {
  alignas(64) uint8_t block[64 * 64];
  __m512i rows[16];
  for (size_t c = 0; c < 64; c += 16) {
    const uint8_t* row = x + c;
    for (size_t i = 0; i < 16; ++i, row += stride) {
      asm("" : "+r"(row));  // else the compiler computes 64 addresses first and keeps them in memory
      rows[i] = four_lanes([=](size_t lane) NNORM_VBMI { return load_lane(row + 16 * lane * stride); });
    }
    transpose_lanes(rows);  // 64 samples of a channel
    for (size_t i = 0; i < 16; ++i)
      _mm512_store_si512(block + (c + i) * 64, look_up_vbmi(rows[i], vbmi_table(tables + (c + i) * table_entries)));
  }
  for (size_t s = 0; s < 64; s += 16) {
    load_samples(block, s, rows);
    for (size_t i = 0; i < 16; ++i) _mm512_storeu_si512(y + (s + i) * stride, rows[i]);
  }
}

// Looks up at most 64 rows of `width` elements. The first element belongs to channel `first`; channel 0 follows the
// last one.
NNORM_VBMI inline void look_up_vbmi_part_of_block(const uint8_t* tables, size_t first, size_t channels, size_t width,
                                                  const uint8_t* x, uint8_t* y, size_t samples, size_t stride) {
  alignas(64) uint8_t block[64 * 64];
  __m512i rows[16];
  const size_t last = samples - 1;  // the rows after it do not exist: it is read in their place
  for (size_t begin = 0, c = first; begin < width; begin += 16) {
    const __mmask16 there = __mmask16(first_lanes(width - begin));
    for (size_t i = 0; i < 16; ++i)
      rows[i] = four_lanes([=](size_t lane) NNORM_VBMI {
        const size_t row = i + 16 * lane;
        return _mm_maskz_loadu_epi8(there, x + begin + (row < last ? row : last) * stride);
      });
    transpose_lanes(rows);
    for (size_t i = 0; i < 16; ++i) {
      _mm512_store_si512(block + (begin + i) * 64, look_up_vbmi(rows[i], vbmi_table(tables + c * table_entries)));
      c = c + 1 == channels ? 0 : c + 1;
    }
  }
  for (size_t s = 0; s < samples; s += 16) {
    load_samples(block, s, rows);
    for (size_t i = 0; i < 16 && s + i < samples; ++i)
      _mm512_mask_storeu_epi8(y + (s + i) * stride, first_lanes(width), rows[i]);
  }
}

// As look_up_vbmi_part_of_block, for at most 16 rows: a register holds 16 samples of 4 channels, one channel in each
// lane.
NNORM_VBMI inline void look_up_vbmi_few_rows(const uint8_t* tables, size_t first, size_t channels, size_t width,
                                             const uint8_t* x, uint8_t* y, size_t samples, size_t stride) {
  const __mmask64 there = first_lanes(width);
  const uint8_t* own[64];
  for (size_t i = 0, c = first; i < 64; ++i) {
    own[i] = tables + c * table_entries;
    c = c + 1 == channels ? 0 : c + 1;
  }
  __m512i rows[16];
  for (size_t i = 0; i < 16; ++i)
    rows[i] = i < samples ? _mm512_maskz_loadu_epi8(there, x + i * stride) : _mm512_setzero_si512();
  transpose_lanes(rows);
#pragma GCC unroll 16
  for (size_t i = 0; i < 16; ++i) {
    __m512i low = rows[i], high = rows[i];
#pragma GCC unroll 4
    for (size_t lane = 0; lane < 4; ++lane) {
      const VbmiTable table = vbmi_table(own[16 * lane + i]);
      const __mmask64 in_lane = __mmask64(0xffff) << (16 * lane);
      low = _mm512_mask2_permutex2var_epi8(table.quarter[0], low, in_lane, table.quarter[1]);
      high = _mm512_mask2_permutex2var_epi8(table.quarter[2], high, in_lane, table.quarter[3]);
    }
    rows[i] = _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(rows[i]), high);
  }
  transpose_lanes(rows);
  for (size_t i = 0; i < samples; ++i) _mm512_mask_storeu_epi8(y + i * stride, there, rows[i]);
}

// Fewer rows than `least_rows_of_a_block` are looked up one element at a time. Two calls of look_up_vbmi_few_rows take
// less time than a block.
constexpr size_t least_rows_of_a_block = 8, few_rows = 16;

// Looks up the elements [begin, end) of each row, for the samples of an item.
NNORM_VBMI inline void look_up_vbmi_last(const uint8_t* tables, size_t channels, const Columns& columns, size_t begin,
                                         size_t end, const uint8_t* x, uint8_t* y, size_t samples) {
  const size_t stride = columns.row_length, width = end - begin;
  size_t rows = samples / columns.samples_of_a_row, done = 0;
  if (rows >= least_rows_of_a_block)  // other nodes have evicted the tables from the caches since the last run
    prefetch<second_level>(tables + begin * table_entries, (width < channels ? width : channels) * table_entries);
  for (size_t n; rows - done >= least_rows_of_a_block; done += n) {
    const size_t at = done * stride + begin;
    n = rows - done < 64 ? rows - done : 64;
    if (n > few_rows && n <= 2 * few_rows) n = few_rows;
    if (n == 64 && width == 64 && columns.samples_of_a_row == 1)
      look_up_vbmi_block(tables + begin * table_entries, x + at, y + at, stride);
    else if (n > few_rows)
      look_up_vbmi_part_of_block(tables, begin, channels, width, x + at, y + at, n, stride);
    else
      look_up_vbmi_few_rows(tables, begin, channels, width, x + at, y + at, n, stride);
  }
  // The rest. If a row holds several samples, there is one column, with all channels.
  done *= columns.samples_of_a_row;
  const size_t in_a_sample = columns.samples_of_a_row > 1 ? channels : width, at = done * channels + begin;
  look_up_last_each(tables + begin * table_entries, in_a_sample, x + at, y + at, samples - done, channels);
}
#endif

#if defined(__AVX2__)
// A shuffle looks up the low four bits of a byte in one part of 16 entries, and returns 0 if the byte is 128 or more.
// Before part p, 16·p has been subtracted: the byte is below 128 for its own part and for the seven parts before it.
// The XOR of these eight lookups must be the entry, so a part holds its difference from the part before; from part 8
// on, also the difference that the part eight before it holds.
NNORM_INLINE void look_up_avx2_row(const uint8_t* table, const uint8_t* x, uint8_t* y, size_t n) {
  __m256i part[16], difference[16];
  for (int i = 0; i < 16; ++i)
    part[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 16 * i)));
  difference[0] = part[0];
  for (int i = 1; i < 8; ++i) difference[i] = _mm256_xor_si256(part[i], part[i - 1]);
  difference[8] = _mm256_xor_si256(_mm256_xor_si256(part[8], part[7]), part[0]);
  for (int i = 9; i < 16; ++i)
    difference[i] =
        _mm256_xor_si256(_mm256_xor_si256(part[i], part[i - 1]), _mm256_xor_si256(part[i - 8], part[i - 9]));
  const __m256i sixteen = _mm256_set1_epi8(16);
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    __m256i sum = _mm256_shuffle_epi8(difference[0], v);
    for (int p = 1; p <= 8; ++p) {
      v = _mm256_sub_epi8(v, sixteen);
      sum = _mm256_xor_si256(sum, _mm256_shuffle_epi8(difference[p], v));
    }
    for (int p = 9; p < 16; ++p) {
      v = _mm256_subs_epi8(v, sixteen);
      sum = _mm256_xor_si256(sum, _mm256_shuffle_epi8(difference[p], v));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i), sum);
  }
  look_up_each(table, x + i, y + i, n - i);
}
#endif

#if defined(__aarch64__)
NNORM_INLINE void look_up_neon_row(const uint8_t* table, const uint8_t* x, uint8_t* y, size_t n) {
  const uint8x16x4_t a = vld1q_u8_x4(table), b = vld1q_u8_x4(table + 64);
  const uint8x16x4_t c = vld1q_u8_x4(table + 128), d = vld1q_u8_x4(table + 192);
  const uint8x16_t quarter = vdupq_n_u8(64);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    uint8x16_t v = vld1q_u8(x + i);
    uint8x16_t found = vqtbl4q_u8(a, v);  // 0 if the index is 64 or more; vqtbx4q_u8 then keeps `found`
    found = vqtbx4q_u8(found, b, v = vsubq_u8(v, quarter));
    found = vqtbx4q_u8(found, c, v = vsubq_u8(v, quarter));
    found = vqtbx4q_u8(found, d, vsubq_u8(v, quarter));
    vst1q_u8(y + i, found);
  }
  look_up_each(table, x + i, y + i, n - i);
}
#endif

// The fastest lookup without AVX-512 VBMI, for n elements of one channel, and for samples whose channels are last.
struct PlainLookUp {
  static NNORM_INLINE void row(const uint8_t* table, const uint8_t* x, uint8_t* y, size_t n) {
#if defined(__aarch64__)
    look_up_neon_row(table, x, y, n);
#elif defined(__AVX2__)
    if (n >= 256)  // fewer elements do not pay for the differences
      look_up_avx2_row(table, x, y, n);
    else
      look_up_each(table, x, y, n);
#else
    look_up_each(table, x, y, n);
#endif
  }
  static NNORM_INLINE void last(const uint8_t* tables, size_t channels, const Columns& columns, size_t begin, size_t end,
                                const uint8_t* x, uint8_t* y, size_t samples) {
    const size_t in_a_sample = columns.samples_of_a_row > 1 ? channels : end - begin;
    look_up_last_each(tables + begin * table_entries, in_a_sample, x + begin, y + begin, samples, channels);
  }
};

#if defined(__AVX512BW__)
struct VbmiLookUp {
  static NNORM_INLINE void row(const uint8_t* table, const uint8_t* x, uint8_t* y, size_t n) {
    look_up_vbmi_row(table, x, y, n);
  }
  static NNORM_INLINE void last(const uint8_t* tables, size_t channels, const Columns& columns, size_t begin, size_t end,
                                const uint8_t* x, uint8_t* y, size_t samples) {
    look_up_vbmi_last(tables, channels, columns, begin, end, x, y, samples);
  }
};
#endif

// Computes n elements of y as sums of steps and a residual. The table of element i starts `i·own` entries after
// `steps`.
template <size_t own>
NNORM_INLINE void sum_run(const float* steps, const QuantizedSum& sum, const uint8_t* x, const uint8_t* residual, uint8_t* y,
                          size_t n) {
  constexpr float to_integer = 12582912.0f;  // 1.5·2²³: adding it rounds a number of steps to an integer, ties to even
  const QuantizedSum s = sum;                // a copy: y cannot alias it
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const float r = (float(int32_t(residual[i]) ^ s.sign_flip) - s.offset) * s.factor;
    float value = steps[int32_t(i) * int32_t(own) + int32_t(x[i])] + r;
    value = value > s.least ? value : s.least;
    value = value < s.greatest ? value : s.greatest;
    y[i] = uint8_t(bits_of(value + to_integer) - bits_of(to_integer) + s.zero_point);
  }
}

// Calls row(channel, first element, number of elements) for each row of [channels, extent] in elements [first, last).
template <class Row>
NNORM_INLINE void for_each_row(const QuantizedWork& work, size_t first, size_t last, Row row) {
  size_t position = first % work.extent, channel = first / work.extent % work.channels;
  while (first < last) {
    const size_t left_in_row = work.extent - position, left = last - first, n = left < left_in_row ? left : left_in_row;
    row(channel, first, n);
    first += n;
    position = 0;
    channel = channel + 1 == work.channels ? 0 : channel + 1;
  }
}

// Calls column(begin, end, first sample, number of samples) for each column of items [begin, end).
template <class Column>
NNORM_INLINE void for_each_column(const QuantizedWork& work, const Columns& columns, size_t begin, size_t end, Column column) {
  const ItemsOfColumns item(work, columns);
  for (size_t i = begin; i < end; ++i) {
    const size_t first = i / item.column_groups * item.samples, from = i % item.column_groups * item.columns;
    const size_t left = work.samples - first, samples = left < item.samples ? left : item.samples;
    for (size_t c = from; c < from + item.columns && c < columns.count; ++c)
      column(columns.begin(c), columns.begin(c + 1), first, samples);
  }
}

template <class LookUp>
void quantized_table(const QuantizedWork& work, size_t begin, size_t end) {
  if (begin == end) return;  // the tensor may be empty
  if (work.extent == 1) {
    const Columns columns(work.channels);
    return for_each_column(work, columns, begin, end, [&](size_t from, size_t to, size_t first, size_t samples) {
      const size_t at = first * work.channels;
      LookUp::last(work.bytes, work.channels, columns, from, to, work.x + at, work.y + at, samples);
    });
  }
  const size_t beyond = end * bytes_per_item, last = beyond < work.size() ? beyond : work.size();
  for_each_row(work, begin * bytes_per_item, last, [&](size_t channel, size_t at, size_t n) {
    LookUp::row(work.bytes + channel * table_entries, work.x + at, work.y + at, n);
  });
}

inline void quantized_sum(const QuantizedWork& work, size_t begin, size_t end) {
  if (begin == end) return;
  if (work.extent == 1) {
    const Columns columns(work.channels);
    return for_each_column(work, columns, begin, end, [&](size_t from, size_t to, size_t first, size_t samples) {
      const size_t width = columns.samples_of_a_row > 1 ? work.channels : to - from;
      for (size_t s = first; s < first + samples; ++s) {
        const size_t at = s * work.channels + from;
        sum_run<table_entries>(work.steps + from * table_entries, work.sum, work.x + at, work.residual + at, work.y + at,
                               width);
      }
    });
  }
  const size_t beyond = end * bytes_per_item, last = beyond < work.size() ? beyond : work.size();
  for_each_row(work, begin * bytes_per_item, last, [&](size_t channel, size_t at, size_t n) {
    sum_run<0>(work.steps + channel * table_entries, work.sum, work.x + at, work.residual + at, work.y + at, n);
  });
}

inline QuantizedKernels quantized_kernels() {
#if defined(__AVX512BW__)
  if (processor_has("avx512vbmi")) return {"avx512vbmi", &quantized_table<VbmiLookUp>, &quantized_sum};
#endif
  return {"", &quantized_table<PlainLookUp>, &quantized_sum};
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
