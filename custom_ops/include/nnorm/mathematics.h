// The formulas of normality normalization, for CPUs and GPUs.
//
//   ψ(h; λ) = s·((1 + |h|)^η − 1)/η,   s = sign of h,   η = η₊ where h ≥ 0, η₋ where h < 0          (NN eq. 3)
//
// evaluated as s/η·(2^(η·log₂(1 + |h|)) − 1) without branches and without cancellation:
//
// - log₂(1 + a) is represented as an integer plus a fraction. Only the difference between z = η·log₂(1 + a) and its
//   nearest integer is rounded: 2^z would magnify the rounding of a large z.
// - 2^z − 1 is computed as 2^n·(2^f − 1) + (2^n − 1), where n is the integer nearest to z. Only 2^f − 1 and the sum are
//   rounded: scaling by 2^n is exact, and 2^n − 1 is rounded only if one of its terms is below the last place of the other.
// - η = 0 needs no branch: Format::least_exponent replaces exponents of smaller magnitude, which gives the limit
//   s·log(1 + |h|).
// - NaN propagates. 2^126 (double: 2^1022) replaces |h| above it, infinity included; 2^z saturates at about 2^128
//   (2^1024) before it is multiplied by the weight. Finite inputs give no infinite intermediate result if the gain
//   output_divisor·weight/η is finite: for |weight| up to 2^101 (2^963) with any exponent, up to 2^127·|η| (2^1023·|η|)
//   otherwise.
//
// Valid range of ψ: exponents in [−2, 4] and |h| up to 2^126, unless 2^z saturates
// Max error of ψ: 5 units in the last place (double: 6)
//
// The error grows by least_exponent·log(1 + |h|)/2 if least_exponent replaces η, and is greater for greater exponents.
// If |h·η| is near the smallest normal number, the error is less than 2·(1 + output_divisor/|η|) times the smallest
// denormal number.
//
// Everything is a template of the arithmetic type, float or double, written so that compilers vectorize it and nvcc
// compiles it for devices. Tests enforce every bound that is stated here: tests/test_psi.cpp that of ψ, and
// tests/test_mathematics.cpp the others. The error of a denormal result is relative to the smallest normal number.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define NNORM_INLINE __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define NNORM_INLINE __forceinline
#else
#define NNORM_INLINE inline __attribute__((always_inline))
#endif

// Stands before a loop with a constant number of steps. Otherwise GCC unrolls it too late to vectorize the loop around
// it.
#if defined(__CUDACC__)
#define NNORM_UNROLL _Pragma("unroll")
#else
#define NNORM_UNROLL _Pragma("GCC unroll 16")
#endif

// The instruction set that this source is compiled for, `cuda` for GPUs; its name is also a namespace. One library has
// several: the namespaces keep the linker from using code of an instruction set that the machine lacks.
#ifndef NNORM_INSTRUCTION_SET
#define NNORM_INSTRUCTION_SET portable
#endif

namespace nnorm {

// The numbers that the kernels compare every element with; bounds() returns them.
template <class Real>
struct Bounds {
  Real zero, greatest_magnitude;
};

// With NNORM_HIDE_BOUNDS, bounds() returns these variables of cpu/bounds.cpp. GCC 12 compiles a minimum or a maximum to
// one instruction if it cannot see the value of the bound, else to up to six.
extern const Bounds<float> bounds_of_float;
extern const Bounds<double> bounds_of_double;

inline namespace NNORM_INSTRUCTION_SET {

template <class Real>
struct Format;

template <>
struct Format<float> {
  using Bits = int32_t;
  using Unsigned = uint32_t;
  static constexpr int mantissa_bits = 23;
  static constexpr Bits one = 0x3f800000;
  static constexpr Bits sqrt_half = 0x3f3504f3;
  static constexpr float greatest_magnitude = 0x1p126f;
  // 1.5·2^23: the low bits of round + x are the integer nearest to x.
  static constexpr float round = 0x1.8p23f;
  static constexpr Bits round_bits = 0x4b400000;
  static constexpr Bits greatest_biased_exponent = 0xfe;
  static constexpr float exponent_bias = 127.0f;
  static constexpr float least_exponent = 0x1p-26f;
  static constexpr float greatest_exponent = 0x1p15f;
};

template <>
struct Format<double> {
  using Bits = int64_t;
  using Unsigned = uint64_t;
  static constexpr int mantissa_bits = 52;
  static constexpr Bits one = 0x3ff0000000000000;
  static constexpr Bits sqrt_half = 0x3fe6a09e667f3bcd;
  static constexpr double greatest_magnitude = 0x1p1022;
  static constexpr double round = 0x1.8p52;
  static constexpr Bits round_bits = 0x4338000000000000;
  static constexpr Bits greatest_biased_exponent = 0x7fe;
  static constexpr double exponent_bias = 1023.0;
  static constexpr double least_exponent = 0x1p-60;
  static constexpr double greatest_exponent = 0x1p40;
};

// `Accurate` computes (2^z − 1)/output_divisor, so that z may reach 128 (double: 1024), where 2^z is infinite although
// weight/η·2^z may be finite. The gains are multiplied by output_divisor.
constexpr int log2_output_divisor = 1;
template <class Real>
constexpr Real output_divisor = Real(1 << log2_output_divisor);

NNORM_INLINE int32_t bits_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
NNORM_INLINE int64_t bits_of(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
NNORM_INLINE float from_bits(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
NNORM_INLINE double from_bits(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// a·b + c, rounded once. The formulas call it wherever a product and a sum are fused, and compilers fuse nothing else
// (-ffp-contract=off), so that results have the same bits on every processor.
#if defined(__CUDACC__)
NNORM_INLINE double fused(double a, double b, double c) { return ::fma(a, b, c); }
NNORM_INLINE float fused(float a, float b, float c) { return ::fmaf(a, b, c); }
#else
NNORM_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
NNORM_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// In double the product is exact. Its sum with c is rounded to odd, so that the second rounding, to float, is correct.
// The function does not compare or multiply 64-bit integers, because SSE2 cannot do so in vectors.
NNORM_INLINE float fused(float a, float b, float c) {
  const double product = double(a) * double(b), wide = double(c), sum = product + wide;
  const double added = sum - product, rest = (product - (sum - added)) + (wide - added);  // sum + rest is exact
  const uint64_t bits = uint64_t(bits_of(sum)), opposite = (bits ^ uint64_t(bits_of(rest))) >> 63;
  const uint64_t is_even = ~bits & 1, away = rest < 0 || rest > 0 ? is_even : 0;  // 0 if rest is NaN, as for infinities and NaN
  return float(from_bits(int64_t(bits + away - ((away & opposite) << 1))));
}
#endif
#endif

#if defined(NNORM_HIDE_BOUNDS)
NNORM_INLINE const Bounds<float>& bounds(float) { return bounds_of_float; }
NNORM_INLINE const Bounds<double>& bounds(double) { return bounds_of_double; }
#else
template <class Real>
NNORM_INLINE constexpr Bounds<Real> bounds(Real) {
  return {Real(0), Format<Real>::greatest_magnitude};
}
#endif

// min(value, bound). NaN stays NaN, unlike in a device's fmin.
NNORM_INLINE double at_most(double value, double bound) { return value > bound ? bound : value; }
NNORM_INLINE float at_most(float value, float bound) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(value), "f"(bound));
  return least;
#else
  return value > bound ? bound : value;
#endif
}

// x·(c₀ + c₁·x + c₂·x² + …), in two independent chains of half the length. The first-order term is added last, so that
// only its rounding counts in full. On a GPU, where other threads run while one waits, Horner's scheme would save 2 of
// 46 operations, but would give other bits than a CPU.
template <int count>
NNORM_INLINE float times_polynomial(float x, const float (&c)[count]) {
  constexpr bool odd = count % 2 == 0;  // whether the number of terms from c₁ on is odd
  const float x2 = x * x;
  float sum = odd ? c[count - 1] : fused(c[count - 1], x, c[count - 2]);
  NNORM_UNROLL for (int i = odd ? count - 3 : count - 4; i > 0; i -= 2) sum = fused(sum, x2, fused(c[i + 1], x, c[i]));
  return fused(x, c[0], sum * x2);
}

// log₂(1 + m). custom_ops/scripts/fit_polynomials.py computes the coefficients here and below.
//
// Valid range: m in [√½ − 1, √2 − 1]
// Max relative error: 1.5e-7, of which the polynomial has 2.8e-8
NNORM_INLINE float log2_1p_of_mantissa(float m) {
  constexpr float c[] = {1.44269502f,   -0.721347392f, 0.48090896f,   -0.360700577f, 0.287953496f,
                         -0.239014849f, 0.215480775f,  -0.206787512f, 0.125843421f};
  return times_polynomial(m, c);
}

// The same in double, by the series of 2·atanh(r)/ln 2 with r = m/(2 + m), |r| ≤ 0.172. The first-order term is added
// last, so that only its rounding counts in full.
//
// Max relative error: 3.5e-16
NNORM_INLINE double log2_1p_of_mantissa(double m) {
  constexpr double c[] = {2.8853900817779268, 0.9617966939259756, 0.5770780163555853, 0.4121985831111324, 0.3205988979753252,
                          0.2623081892525388, 0.22195308321368667, 0.19235933878519512, 0.16972882833987804, 0.15186263588304877,
                          0.1373995277037108, 0.12545174268599682};  // 2/(k·ln 2) for k = 1, 3, 5, …
  const double r = m / (2.0 + m), r2 = r * r;
  double sum = c[11];
  NNORM_UNROLL for (int k = 10; k > 0; --k) sum = fused(sum, r2, c[k]);
  return fused(r, c[0], r * r2 * sum);
}

// 2^f − 1.
//
// Valid range: |f| ≤ ½
// Max relative error: 1.5e-7, of which the polynomial has 1.3e-8
NNORM_INLINE float exp2_m1_of_fraction(float f) {
  constexpr float c[] = {0.693147182f, 0.240226492f, 0.0555036739f, 0.00961831119f, 0.00133873872f, 0.000153820118f};
  return times_polynomial(f, c);
}

// The same in double, by 14 terms of the exponential series.
//
// Max relative error: 2e-16
NNORM_INLINE double exp2_m1_of_fraction(double f) {
  constexpr double c[] = {0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477,
                          0.0013333558146428443, 0.0001540353039338161, 1.5252733804059841e-05, 1.321548679014431e-06,
                          1.01780860092397e-07, 7.054911620801123e-09, 4.4455382718708116e-10, 2.5678435993488206e-11,
                          1.3691488853904128e-12, 6.778726354822545e-14};  // (ln 2)^k/k!
  double sum = c[13];
  NNORM_UNROLL for (int k = 12; k > 0; --k) sum = fused(sum, f, c[k]);
  return fused(f, c[0], f * f * sum);
}

// A logarithm to base 2 as a sum. The integer is exact; the fraction is in [−½, ½] before it is rounded.
template <class Real>
struct Log2 {
  Real integer, fraction;
};

// copysign(size, h) for a size whose sign bit is 0, in fewer instructions.
template <class Real>
NNORM_INLINE Real with_sign_of(Real h, Real size) {
  return from_bits(typename Format<Real>::Bits(bits_of(size) | (bits_of(h) & bits_of(Real(-0.0)))));
}

// |h|, clamped to the greatest magnitude that the functions below accept.
template <class Real>
NNORM_INLINE Real magnitude(Real h) {
  return at_most(std::fabs(h), bounds(h).greatest_magnitude);
}

// log₂(1 + a).
//
// Valid range: a = magnitude(h)
// Max relative error of integer + fraction: 1.6e-7 (double: 3.5e-16), also for tiny a
template <class Real>
NNORM_INLINE Log2<Real> log2_1p(Real a) {
  using F = Format<Real>;
  using Bits = typename F::Bits;
  const Bits exponent = (bits_of(Real(1) + a) - F::sqrt_half) & ~((Bits(1) << F::mantissa_bits) - 1);
  const Real scale = from_bits(Bits(F::one - exponent));  // 2^−integer
  const Real m = fused(a, scale, scale - Real(1));        // (1 + a)·scale − 1, without forming 1 + a
  return {Real(int32_t(exponent >> F::mantissa_bits)), log2_1p_of_mantissa(m)};
}

// (2^z − 1)/output_divisor for z = η·log.
//
// Valid range: |z| ≤ 2^22 (double: 2^51), or up to exponent_bias − 2 if `bounded`
// Max relative error: 2.2e-7 (3.5e-16) until the result saturates, if the error of z is at most 6e-8 (1.2e-16) times
// |η| and at most twice that times |z|: for small z the result is proportional to z
template <bool bounded = false, class Real>
NNORM_INLINE Real exp2_m1(Log2<Real> log, Real eta) {
  using F = Format<Real>;
  using Bits = typename F::Bits;
  constexpr Real magic = F::round + (F::exponent_bias - log2_output_divisor);
  const Real shifted = fused(eta, log.integer + log.fraction, magic);
  const Real n = shifted - magic;
  // Rounding η·integer before n is subtracted would lose the difference.
  const Real f = fused(eta, log.fraction, fused(eta, log.integer, -n));
  Bits biased = bits_of(shifted);
  if (!bounded) {  // the clamp is of integers: compilers turn a floating-point clamp into chains of comparisons
    constexpr Bits least = F::round_bits + 1, greatest = F::round_bits + F::greatest_biased_exponent;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 12  // one instruction; a scale of 0 gives the result of 2^-126, which is −½
    if constexpr (sizeof(Real) == 4) {
      biased = __viaddmin_s32_relu(biased, -F::round_bits, F::greatest_biased_exponent);
    } else
#endif
    {
      biased = biased < least ? least : biased;
      biased = biased > greatest ? greatest : biased;
    }
  }
  const Real scale = from_bits(Bits(typename F::Unsigned(biased) << F::mantissa_bits));  // 2^n/output_divisor
  return fused(exp2_m1_of_fraction(f), scale, scale - Real(1) / output_divisor<Real>);
}

// The two functions above and division, as a type that templates can exchange for ForHalf (half_mathematics.h).
struct Accurate {
  static constexpr int output_divisor = NNORM_INSTRUCTION_SET::output_divisor<int>;

  template <class Real>
  static NNORM_INLINE Real magnitude(Real h) {
    return NNORM_INSTRUCTION_SET::magnitude(h);
  }
  template <class Real>
  static NNORM_INLINE Log2<Real> log2_1p(Real a) {
    return NNORM_INSTRUCTION_SET::log2_1p(a);
  }
  template <bool bounded = false, class Real>
  static NNORM_INLINE Real exp2_m1(Log2<Real> log, Real eta) {
    return NNORM_INSTRUCTION_SET::exp2_m1<bounded>(log, eta);
  }
  template <class Real>
  static NNORM_INLINE Real quotient(Real a, Real b) {
    return a / b;
  }
};

// η and the gain for one sign of h: weight·ψ(h) = gain·exp2_m1(log₂(1 + |h|), eta).
//
// Max relative error of the gain: 6e-8 (double: 1.2e-16), one rounding
template <class Real>
struct Branch {
  Real eta, gain;
};

template <class Real>
NNORM_INLINE Real usable_exponent(Real eta) {
  const Real size = std::fabs(eta);
  const Real least = Format<Real>::least_exponent, greatest = Format<Real>::greatest_exponent;
  return std::copysign(size < least ? least : (size > greatest ? greatest : size), eta);  // NaN stays NaN
}

// `sign` is +1 for the branch of h ≥ 0, −1 for the branch of h < 0. The exponent is divided by output_divisor, which is
// exact. The weight multiplied by output_divisor may be infinite although the gain is finite.
template <class Evaluation = Accurate, class Real>
NNORM_INLINE Branch<Real> branch(Real eta, Real weight, Real sign) {
  const Real usable = usable_exponent(eta);
  return {usable, Evaluation::quotient(sign * weight, usable * (Real(1) / Real(Evaluation::output_divisor)))};
}

// The sums over a row from which λ̂ is computed (NN eq. 5–15), with t = log(1 + a), d = (1 + a)·t − a, a = |h|.
//
// Max errors of the terms, in order: 2.7e-7·t, 3.2e-7·a·(1 + a)·t, 3.2e-7·(1 + a)·t, 7e-7·((1 + a)·t)² (double: factors
// 7e-16, 8e-16, 8e-16, 1.6e-15). They are not relative to the terms: d cancels as a → 0, where the terms are negligible
// in the sums.
template <class Real>
struct LmbdaSums {
  Real signed_log;  // Σ s·t
  Real h_d;         // Σ h·d
  Real d;           // Σ d
  Real curvature;   // Σ a·((1 + a)·t² − 2d) + d²
};

template <class Real>
NNORM_INLINE void add_lmbda_terms(Real h, Real a, Log2<Real> log, Real& signed_log, Real& h_d, Real& d_sum,
                                  Real& curvature) {
  constexpr Real ln2 = Real(0.693147180559945309417232121);
  const Real t = (log.integer + log.fraction) * ln2, grown = (Real(1) + a) * t, d = grown - a;
  signed_log += with_sign_of(h, t);
  h_d = fused(h, d, h_d);
  d_sum += d;
  curvature += fused(grown, a * t, d * fused(Real(-2), a, d));  // the term of LmbdaSums, rearranged
}

// η₊ and η₋ of a row, from λ̂ = 1 − L′/(L″ + δ) (NN eq. 14, order 2) and the exponent shift δ.
//
// Max error added: 3 units in the last place of each term that cancels
//
// L″ is positive: for values of variance 1 it is at least 0.188 (found by search). If ε is greater than the variance,
// L″ falls as h⁴; only then can λ̂ be large.
template <class Real>
struct Exponents {
  Real pos, neg;
};

// `mean` has the means of the terms of LmbdaSums.
template <class Real>
NNORM_INLINE Real estimate_lmbda(LmbdaSums<Real> mean, Real delta) {
  const Real slope = mean.h_d - mean.signed_log;
  const Real curvature = fused(Real(-2) * mean.h_d, mean.h_d, fused(-mean.d, mean.d, mean.curvature));
  const Real damped = curvature + delta;
  return damped == 0 ? Real(1) : Real(1) - slope / damped;  // 0 only for equal elements with δ = 0
}

template <class Real>
NNORM_INLINE Real shifted_exponent(Real eta, Real delta) {
  return std::fabs(eta) <= delta ? Real(0) : eta + std::copysign(delta, eta);  // NaN stays NaN
}

template <class Real>
NNORM_INLINE Exponents<Real> resolve_exponents(Real lmbda, Real delta) {
  return {shifted_exponent(lmbda, delta), shifted_exponent(Real(2) - lmbda, delta)};
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
