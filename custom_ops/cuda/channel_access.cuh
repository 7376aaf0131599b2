// BatchNormalNorm of one access: the arithmetic that its kernels share, and the channels that they read.
//
// 16-bit tensors are computed by ForChannels, which has to clamp nothing if |x| is within a limit of the channel. One test
// of its pairs tells whether this holds for all elements of an access.
#pragma once

#include "launch.cuh"
#include "nnorm/channel.h"

namespace nnorm::cuda {

constexpr unsigned channel_threads = 256;

// The arithmetic of channels of T. It takes any x, unless in_range.
template <class T, bool in_range = false>
using ChannelEvaluation = std::conditional_t<computed_by_device<T>, ForChannels<in_range>, Accurate>;

// The elements of an access as they were loaded, 16-bit elements in pairs: in a loop nvcc keeps each 16-bit number in a
// register of its own, and packs and unpacks them.
template <class T, int width, bool in_pairs = sizeof(T) == 2 && width % 2 == 0>
struct alignas(sizeof(T) * width) Elements {
  T values[width];

  NNORM_DEVICE Arithmetic<T> operator[](int j) const { return widened(values[j]); }
};
template <class T, int width>
struct alignas(sizeof(T) * width) Elements<T, width, true> {
  uint32_t pairs[width / 2];

  NNORM_DEVICE float operator[](int j) const {
    const uint32_t pair = pairs[j / 2];
#if defined(__CUDA_ARCH__)
    if constexpr (std::is_base_of_v<BFloat16, T>) {
      return __uint_as_float(j % 2 ? pair & 0xffff0000u : pair << 16);
    } else {
      float result;
      if (j % 2)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(result) : "r"(pair));
      else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(result) : "r"(pair));
      return result;
    }
#else
    T element;
    element.bits = uint16_t(pair >> (j % 2 ? 16 : 0));
    return widened(element);
#endif
  }
};

template <int width, class T>
NNORM_DEVICE Elements<T, width> load_elements(const T* from) {
  NNORM_CHECK_ACCESS(from, sizeof(Elements<T, width>));
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const Elements<T, width>*>(from);
#else
  Elements<T, width> elements;
  memcpy(&elements, from, sizeof elements);
  return elements;
#endif
}

// The elements of an access whose elements were loaded one by one.
template <class T, int width>
struct Separate : Access<T, width> {
  NNORM_DEVICE Arithmetic<T> operator[](int j) const { return widened(this->values[j]); }
};

// The bits of the pairs of an access without their signs, and the bits of the signs.
constexpr uint32_t magnitudes = 0x7fff7fff, signs = 0x80008000;

// A limit of |x|, twice, each with a bit above it. |x| is subtracted from both: the bits remain where |x| is not greater,
// because numbers of 16 bits without their signs are ordered as integers, NaN above infinity.
struct Guard {
  uint32_t limits;

  template <class T>
  static NNORM_DEVICE Guard of(float limit) {
    constexpr float greatest = std::is_same_v<T, Float16> ? 65504.0f : 0x1.fep127f;  // finite number of T
    T rounded;
    narrow(at_most(limit, greatest), rounded);
    return limit >= 0.0f ? Guard{signs | rounded.bits * 0x10001u} : Guard{magnitudes};  // holds nothing
  }
  NNORM_DEVICE bool holds(uint32_t greatest) const { return (~(limits - greatest) & signs) == 0; }
};

// The greater |elements| of two pairs.
template <class T>
NNORM_DEVICE uint32_t greater_magnitudes(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t greater;
  if constexpr (std::is_same_v<T, Float16>)
    asm("{\n.reg .b32 u, v;\nabs.f16x2 u, %1;\nabs.f16x2 v, %2;\nmax.NaN.f16x2 %0, u, v;\n}"
        : "=r"(greater)
        : "r"(a), "r"(b));
  else
    asm("{\n.reg .b32 u, v;\nabs.bf16x2 u, %1;\nabs.bf16x2 v, %2;\nmax.NaN.bf16x2 %0, u, v;\n}"
        : "=r"(greater)
        : "r"(a), "r"(b));
  return greater;
#else
  constexpr uint32_t low = 0x7fff, high = 0x7fff0000;
  const uint32_t low_a = a & low, low_b = b & low, high_a = a & high, high_b = b & high;
  return (low_a > low_b ? low_a : low_b) | (high_a > high_b ? high_a : high_b);
#endif
}

// Whether all elements are within a limit. NaN is not.
template <class T, int width>
NNORM_DEVICE bool are_within(const Elements<T, width>& x, Guard guard) {
  uint32_t greatest = greater_magnitudes<T>(x.pairs[0], x.pairs[1]);
#pragma unroll
  for (int i = 2; i < width / 2; ++i) greatest = greater_magnitudes<T>(greatest, x.pairs[i]);
  return guard.holds(greatest);
}

// A channel in shared memory or in a table.
template <class T>
struct alignas(16) Entry {
  Channel<Arithmetic<T>> channel;
};

// The same with its guard, if tensors of T need one.
template <class T, bool by_device = computed_by_device<T>>
struct alignas(16) Guarded {
  Channel<Arithmetic<T>> channel;
  Arithmetic<T> padding;  // accesses to the table read it too

  static NNORM_DEVICE Guarded of(const Channel<Arithmetic<T>>& channel) { return {channel, 0}; }
};
template <class T>
struct alignas(16) Guarded<T, true> {
  Channel<float> channel;
  Guard guard;

  static NNORM_DEVICE Guarded of(const Channel<float>& c) {
    return {c, Guard::of<T>(input_limit(c.scale, c.shift, c.eta_pos, c.eta_neg))};
  }
};

// The parameters of one channel as they were loaded.
template <class T>
struct LoadedChannel {
  Arithmetic<T> scale, shift, exponent_pos, exponent_neg, weight, bias;

  NNORM_DEVICE Channel<Arithmetic<T>> prepared() const {
    return channel_from<ChannelEvaluation<T>>(scale, shift, exponent_pos, exponent_neg, weight, bias);
  }
};

// A problem, and the table of its channels if prepare() has made one.
template <class T>
struct PreparedProblem : ChannelProblem<T> {
  const void* table;
};

// The most neighboring rows whose channels a block of `_tiles` or `_crossing` looks up. Behind the last channel the table
// begins again, so that these are side by side.
constexpr unsigned most_rows_of_block = channel_threads;

constexpr size_t entries_of_table(size_t channels) { return channels + most_rows_of_block; }

template <class T>
struct ChannelParameters {
  const Arithmetic<T>* fields[ChannelProblem<T>::parameter_count];
  const Guarded<T>* table;

  NNORM_DEVICE LoadedChannel<T> load(size_t i) const {
    return {fields[0][i], fields[1][i], fields[2][i], fields[3][i], fields[4][i], fields[5][i]};
  }
  NNORM_DEVICE Channel<Arithmetic<T>> channel(size_t i) const { return load(i).prepared(); }

  NNORM_DEVICE bool has_table() const { return table != nullptr; }
  // An entry of the table, by accesses of 16 bytes. nvcc would load its members one by one, some of them after others.
  NNORM_DEVICE Guarded<T> entry(size_t i) const {
#if defined(__CUDA_ARCH__)
    constexpr int accesses = sizeof(Guarded<T>) / sizeof(uint4);
    uint4 words[accesses];
#pragma unroll
    for (int k = 0; k < accesses; ++k) words[k] = __ldg(reinterpret_cast<const uint4*>(table + i) + k);
    Guarded<T> entry;
    memcpy(&entry, words, sizeof entry);
    return entry;
#else
    return table[i];
#endif
  }
};

// What all kernels get.
template <class T>
struct ChannelTensors {
  const T* x;
  const T* residual;
  T* y;
  ChannelParameters<T> parameters;
};

// The channels of neighboring positions that begin anywhere in a row.
constexpr size_t channels_of_tile(size_t positions, size_t row_length) {
  return divided_up(positions - 1, row_length) + 1;
}

template <class T>
ChannelParameters<T> parameters_of(const PreparedProblem<T>& problem) {
  ChannelParameters<T> parameters{{}, static_cast<const Guarded<T>*>(problem.table)};
  std::copy_n(problem.parameters, std::size(problem.parameters), parameters.fields);
  return parameters;
}

template <class T>
ChannelTensors<T> tensors_of(const PreparedProblem<T>& problem) {
  return {problem.x, problem.residual, problem.y, parameters_of(problem)};
}

// A result whose max(·, 0) is left to the instruction that rounds it. Formula<> is applied to it.
struct Unrounded {
  float value;
  bool is_rectified = false;  // it shall be; known when the kernel is compiled

  NNORM_INLINE float computed() const { return is_rectified ? nnorm::rectified(value) : value; }
};
NNORM_INLINE Unrounded operator+(Unrounded a, Unrounded b) { return {a.computed() + b.computed(), false}; }
NNORM_INLINE Unrounded rectified(Unrounded y) { return {y.value, true}; }

template <class T, int width>
NNORM_DEVICE Access<T, width> narrowed(const Unrounded (&values)[width]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  Access<T, width> result;
#pragma unroll
  for (int j = 0; j < width; j += 2) {
    const float low = values[j].value, high = values[j + 1].value;
    uint32_t pair;
    if constexpr (std::is_same_v<T, Float16>) {
      if (values[j].is_rectified)
        asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
      else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
      if (values[j].is_rectified)
        asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
      else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    memcpy(&result.values[j], &pair, sizeof pair);
  }
  return result;
#else
  float computed[width];
#pragma unroll
  for (int j = 0; j < width; ++j) computed[j] = values[j].computed();
  return narrowed<T>(computed);
#endif
}

// y before it is rounded. With the bits of processors nothing is left to the device.
template <class T, int width>
using Result = std::conditional_t<computed_by_device<T> && width % 2 == 0, Unrounded, Arithmetic<T>>;

NNORM_DEVICE void clear(Unrounded& result) { result.value = 0; }
template <class Real>
NNORM_DEVICE void clear(Real& result) {
  result = 0;
}

struct NoPadding {
  NNORM_DEVICE bool operator()(int) const { return false; }
};

// The results of an access; channel_of(j) is the channel of element j. They are 0 where is_padding(j).
template <class T, Epilogue epilogue, int width, bool in_range = false, class Access, class ChannelOf,
          class IsPadding = NoPadding>
NNORM_DEVICE auto results(const Access& x, const Access& residual, ChannelOf channel_of, IsPadding is_padding = {}) {
  using Real = Arithmetic<T>;
  using Evaluation = ChannelEvaluation<T, in_range>;
  Result<T, width> values[width];
#pragma unroll
  for (int j = 0; j < width; ++j) {
    const Channel<Real> channel = channel_of(j);
    Real h, integer, fraction;
    logarithm<Evaluation>(x[j], channel, h, integer, fraction);
    const Real psi = weighted_psi<Evaluation>(h, integer, fraction, channel);
    const Real added = takes_residual<epilogue> ? residual[j] : Real(0);
    values[j] = Formula<epilogue>::apply(Result<T, width>{psi}, Result<T, width>{added});
    if (is_padding(j)) clear(values[j]);
  }
  return narrowed<T>(values);
}

// Calls put() with the results of an access that has one channel. Both ways of computing them call it: nvcc moves
// elements one by one where two branches with an access meet.
template <Epilogue epilogue, class T, int width, class Put>
NNORM_DEVICE void guarded_results(const Elements<T, width>& x, const Elements<T, width>& residual,
                                  const Guarded<T>& guarded, Put put) {
  const auto channel_of = [&](int) { return guarded.channel; };
  if constexpr (computed_by_device<T>) {
    if (are_within(x, guarded.guard)) {
      put(results<T, epilogue, width, true>(x, residual, channel_of));
      return;
    }
  }
  put(results<T, epilogue, width>(x, residual, channel_of));
}

}  // namespace nnorm::cuda
