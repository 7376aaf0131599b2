// BatchNormalNorm: y = epilogue(weight·ψ(scale·x + shift) + bias) with frozen exponents, in one pass over x.
//
// Two loops compute a tile: logarithms, then powers. Each loop keeps its constants in registers; one loop with all
// constants takes 1.5 times as long. The intermediate results stay in the first-level cache.
#pragma once

#include "float16_tiles.h"
#include "nnorm/channel.h"
#include "nnorm/kernels.h"
#include "prefetch.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

constexpr size_t channel_tile = 256;
// In elements. Of 1, 2, 4, 8 and 16 tiles, 1 and 2 are the fastest on an Intel Xeon, for tensors in the third-level
// cache or in main memory. Prefetching saves nothing for tensors in the second-level cache.
constexpr size_t prefetch_distance = 2 * channel_tile;

template <class Real>
struct alignas(64) ChannelTile {
  Real h[channel_tile], integer[channel_tile], fraction[channel_tile];
};

template <class Real>
NNORM_INLINE const Real* field(const Real* table, size_t width, ChannelField which) {
  return table + size_t(which) * width;
}

template <class Real>
NNORM_INLINE Channel<Real> channel_at(const Real* table, size_t width) {
  return {*field(table, width, ChannelField::scale),    *field(table, width, ChannelField::shift),
          *field(table, width, ChannelField::eta_pos),  *field(table, width, ChannelField::eta_neg),
          *field(table, width, ChannelField::gain_pos), *field(table, width, ChannelField::gain_neg),
          *field(table, width, ChannelField::bias)};
}

// Computes at most one tile of elements, all of one channel.
template <Epilogue epilogue, class T>
NNORM_INLINE void run_shared(const T* x, const T* residual, T* y, size_t n, const Arithmetic<T>* table, size_t width,
                             ChannelTile<Arithmetic<T>>& t) {
  const Channel<Arithmetic<T>> channel = channel_at(table, width);
#pragma omp simd
  for (size_t i = 0; i < n; ++i) logarithm<Accurate>(widened(x[i]), channel, t.h[i], t.integer[i], t.fraction[i]);
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const auto r = takes_residual<epilogue> ? widened(residual[i]) : Arithmetic<T>(0);
    narrow(power<Accurate, epilogue>(t.h[i], t.integer[i], t.fraction[i], r, channel), y[i]);
  }
}

// Computes at most one tile of elements, each of its own channel.
template <Epilogue epilogue, class T>
NNORM_INLINE void run_own(const T* x, const T* residual, T* y, size_t n, const Arithmetic<T>* table, size_t width,
                          ChannelTile<Arithmetic<T>>& t) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i)
    logarithm<Accurate>(widened(x[i]), channel_at(table + i, width), t.h[i], t.integer[i], t.fraction[i]);
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const auto r = takes_residual<epilogue> ? widened(residual[i]) : Arithmetic<T>(0);
    narrow(power<Accurate, epilogue>(t.h[i], t.integer[i], t.fraction[i], r, channel_at(table + i, width)), y[i]);
  }
}

// Computes at most one tile, a multiple of `lanes` elements: element i belongs to channel i mod `lanes`.
template <Epilogue epilogue, size_t lanes, class T>
NNORM_INLINE void run_lanes(const T* x, const T* residual, T* y, size_t n, const Arithmetic<T>* table, size_t width,
                            ChannelTile<Arithmetic<T>>& t) {
  using Real = Arithmetic<T>;
  constexpr size_t fields = size_t(ChannelField::count);
  alignas(64) Real channels[fields * lanes];  // a copy: y cannot alias it, so it stays in registers
  for (size_t f = 0; f < fields; ++f)
    for (size_t i = 0; i < lanes; ++i) channels[f * lanes + i] = table[f * width + i];
  for (size_t o = 0; o < n; o += lanes) {
#pragma omp simd
    for (size_t i = 0; i < lanes; ++i)
      logarithm<Accurate>(widened(x[o + i]), channel_at(channels + i, lanes), t.h[o + i], t.integer[o + i],
                          t.fraction[o + i]);
  }
  for (size_t o = 0; o < n; o += lanes) {
#pragma omp simd
    for (size_t i = 0; i < lanes; ++i) {
      const auto r = takes_residual<epilogue> ? widened(residual[o + i]) : Real(0);
      const Channel<Real> channel = channel_at(channels + i, lanes);
      narrow(power<Accurate, epilogue>(t.h[o + i], t.integer[o + i], t.fraction[o + i], r, channel), y[o + i]);
    }
  }
}

// Computes at most one tile. `table` points to the parameters of its first channel.
template <Epilogue epilogue, Sharing sharing, size_t lanes, class T>
NNORM_INLINE void run_tile(const T* x, const T* residual, T* y, size_t n, const Arithmetic<T>* table, size_t width,
                           ChannelTile<Arithmetic<T>>& t) {
  if constexpr (sharing == Sharing::row)
    run_shared<epilogue>(x, residual, y, n, table, width, t);
  else if constexpr (sharing == Sharing::element)
    run_own<epilogue>(x, residual, y, n, table, width, t);
  else
    run_lanes<epilogue, lanes>(x, residual, y, n, table, width, t);
}

// Computes the elements [first, last) of x tile by tile. A tile ends where a row ends.
template <Epilogue epilogue, Sharing sharing, size_t lanes, class T>
void run_elements(const ChannelWork<T>& work, size_t first, size_t last) {
  ChannelTile<Arithmetic<T>> t;
  size_t position = first % work.row_length, set = first / work.row_length % work.period;
  while (first < last) {
    const size_t left_in_row = work.row_length - position, left = last - first;
    size_t n = left < left_in_row ? left : left_in_row;
    n = n < channel_tile ? n : channel_tile;
    const T* x = work.x + first;
    const T* residual = takes_residual<epilogue> ? work.residual + first : nullptr;
    T* y = work.y + first;
    if (left > prefetch_distance) {
      const size_t prefetched = left - prefetch_distance < n ? left - prefetch_distance : n;
      prefetch(x + prefetch_distance, prefetched);
      if constexpr (takes_residual<epilogue>) prefetch(residual + prefetch_distance, prefetched);
    }
    const size_t channel = sharing == Sharing::element ? position : set * lanes;
    const Arithmetic<T>* table = work.table + channel;
    if constexpr (converts_whole_tiles<T>) {
      alignas(64) Arithmetic<T> wide_x[channel_tile], wide_residual[channel_tile], wide_y[channel_tile];
      widen_tile(x, n, wide_x);
      if constexpr (takes_residual<epilogue>) widen_tile(residual, n, wide_residual);
      run_tile<epilogue, sharing, lanes>(wide_x, wide_residual, wide_y, n, table, work.table_width, t);
      narrow_tile(wide_y, n, y);
    } else {
      run_tile<epilogue, sharing, lanes>(x, residual, y, n, table, work.table_width, t);
    }
    first += n;
    position += n;
    if (position == work.row_length) {
      position = 0;
      set = set + 1 == work.period ? 0 : set + 1;
    }
  }
}

template <Epilogue epilogue, class T>
void run_with(const ChannelWork<T>& work, size_t first, size_t last) {
  switch (work.sharing) {
    case Sharing::row:
      return run_elements<epilogue, Sharing::row, 1>(work, first, last);
    case Sharing::element:
      return run_elements<epilogue, Sharing::element, 1>(work, first, last);
    case Sharing::lane:
      return work.lanes == 16 ? run_elements<epilogue, Sharing::lane, 16>(work, first, last)
                              : run_elements<epilogue, Sharing::lane, 8>(work, first, last);
  }
}

template <class T>
void batch_normal_norm(const ChannelWork<T>& work, size_t begin, size_t end) {
  const size_t first = begin * elements_per_item, beyond = end * elements_per_item;
  const size_t last = beyond < work.size ? beyond : work.size;
  if (first >= last) return;  // rows without elements
  with_epilogue(work.epilogue, [&](auto epilogue) { run_with<decltype(epilogue)::value>(work, first, last); });
}

template <class Real>
void prepare_channels(const Real* const parameters[6], size_t channels, size_t repeat, Real* table) {
  const Real *scale = parameters[0], *shift = parameters[1], *bias = parameters[5];
  const Real *exponent_pos = parameters[2], *exponent_neg = parameters[3], *weight = parameters[4];
#pragma omp simd
  for (size_t c = 0; c < channels; ++c) {
    const Channel<Real> made =
        channel_from<Accurate>(scale[c], shift[c], exponent_pos[c], exponent_neg[c], weight[c], bias[c]);
    const Real fields[] = {made.scale,    made.shift,    made.eta_pos, made.eta_neg,
                           made.gain_pos, made.gain_neg, made.bias};
    for (size_t f = 0; f < size_t(ChannelField::count); ++f) table[f * channels + c] = fields[f];
  }
  if (repeat == 1) return;
  // From the last number to the first, so that each is read before it is overwritten.
  for (size_t i = size_t(ChannelField::count) * channels; i-- > 0;) {
    const Real value = table[i];
    for (size_t r = 0; r < repeat; ++r) table[i * repeat + r] = value;
  }
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
