// ψ of 16-bit tensors, for devices with approximate instructions for log₂ and 2^z.
//
// ψ takes half as many float32 operations as in mathematics.h. Rounding the result to 16 bits hides the greater error.
//
// Max relative error of ψ: 2^-15
// Max error of λ̂: 3e-6
//
// Both bounds hold if the instructions have the errors that NVIDIA documents: 2^-22 for log₂ (absolute for results
// below 1, relative above), 2^-22 relative for 2^z, at most 2^-22 relative for quotients and 1/√x. Short series replace the
// instructions where results are so small that these errors would be too large. 2^z saturates at 2^127, half of the limit
// in mathematics.h. tests/test_half_mathematics.cpp and tests/test_half_rows.cpp enforce the bounds with instructions of
// the greatest documented error.
#pragma once

#include "nnorm/row_statistics.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

#if defined(__CUDA_ARCH__)
#define NNORM_INSTRUCTION(name, instruction)                   \
  NNORM_INLINE float name(float x) {                           \
    float result;                                              \
    asm(instruction " %0, %1;" : "=f"(result) : "f"(x));       \
    return result;                                             \
  }
NNORM_INSTRUCTION(quick_log2, "lg2.approx.ftz.f32")
NNORM_INSTRUCTION(quick_exp2, "ex2.approx.ftz.f32")
NNORM_INSTRUCTION(quick_inverse_root, "rsqrt.approx.ftz.f32")
NNORM_INSTRUCTION(quick_reciprocal, "rcp.approx.ftz.f32")
#undef NNORM_INSTRUCTION
NNORM_INLINE float quick_quotient(float a, float b) { return __fdividef(a, b); }
#else
// Tests set these to the greatest documented errors of the instructions.
inline float quick_log2_error = 0, quick_exp2_error = 0;
inline float quick_log2(float x) {
  const double exact = std::log2(double(x)), size = std::fabs(exact);
  return float(exact + double(quick_log2_error) * (size > 1 ? size : 1));
}
inline float quick_exp2(float z) { return float(std::exp2(double(z)) * (1 + double(quick_exp2_error))); }
inline float quick_quotient(float a, float b) { return a / b * (1 + quick_exp2_error); }
inline float quick_reciprocal(float x) { return 1 / x * (1 + quick_exp2_error); }
inline float quick_inverse_root(float x) { return float(1 / std::sqrt(double(x)) * (1 + double(quick_exp2_error))); }
#endif

struct ForHalf {
  static constexpr int output_divisor = 1;

  static NNORM_INLINE Log2<float> log2_1p(float a) {
    const float series = series_of(a);
    return either(a, series, quick_log2(1.0f + a));
  }

  // The same, given the instruction's result.
  static NNORM_INLINE Log2<float> log2_1p(float a, float logarithm) { return either(a, series_of(a), logarithm); }

  template <bool bounded = false>
  static NNORM_INLINE float exp2_m1(Log2<float> log, float eta) {
    const float z = log.fraction * eta;
    const float series = z * fused(z, fused(z, 0.0555041087f, 0.240226507f), 0.693147180f);
    const float power = quick_exp2(bounded ? z : at_most(z, 127.0f)) - 1.0f;
    return std::fabs(z) < 0x1p-5f ? series : power;
  }

  static NNORM_INLINE float quotient(float a, float b) { return quick_quotient(a, b); }

 private:
  static NNORM_INLINE float series_of(float a) {
    return a * fused(a, fused(a, 0.48089835f, -0.72134751f), 1.44269502f);
  }
  static NNORM_INLINE Log2<float> either(float a, float series, float logarithm) {
    return {-0.0f, a < 0x1p-6f ? series : logarithm};  // adding −0 changes nothing, not even −0
  }
};

// The statistics of a row of LayerNormalNorm and GroupNormalNorm, and ψ of its elements, in fewer operations than by
// ForHalf. Each part tells for which rows it suffices. The formulas above compute the others.
//
// The elements are g = h/ln 2: then all terms of λ̂ have the unit of a logarithm to base 2 without a multiplication.

constexpr float ln_2 = 0.693147181f, per_ln_2 = 1.44269504f;

// g = x·scale + offset, and the mean of h².
struct ScaledStandardization {
  float scale, offset, power;

  NNORM_INLINE float operator()(float x) const { return fused(x, scale, offset); }
};

// The variance from Σx and Σx². The mean must be at most four deviations from 0, so that little cancels, and no square
// may overflow or vanish. A row with NaN or infinity does not meet this.
//
// Max error of h: 4e-6·(|h| + |mean|·inverse)
struct OnePass {
  float mean, variance;

  // `sums` are Σx and Σx².
  static NNORM_INLINE OnePass from(const float (&sums)[2], float inverse_length) {
    const float mean = sums[0] * inverse_length;
    return {mean, fused(-mean, mean, sums[1] * inverse_length)};
  }
  NNORM_INLINE bool suffices(float epsilon) const {
    const float damped = variance + epsilon;
    return mean * mean <= 16.0f * variance && damped >= 0x1p-100f && damped <= 0x1p100f;
  }
  NNORM_INLINE ScaledStandardization standardization(float epsilon) const {
    const float inverse = quick_inverse_root(variance + epsilon), scale = inverse * per_ln_2;
    return {scale, -mean * scale, variance * inverse * inverse};
  }
};

// From two passes over a row, for x − mean. If the variance is infinite, all h are 0.
NNORM_INLINE ScaledStandardization scaled(const Standardization<float>& of_row, float epsilon) {
  const float power = of_row.inverse == 0 ? 0.0f : fused(-epsilon * of_row.inverse, of_row.inverse, 1.0f);
  return {of_row.inverse * per_ln_2, of_row.correction * per_ln_2, power};
}

// λ̂ without the series of ForHalf. The mean of h² must not be small: then the errors of small logarithms do not count.
//
// Max error of λ̂: 3e-6 for normal, uniform and exponential values; 1e-6 times the condition number of λ̂ (TrueLmbda in
// tests/oracle.h) for any
struct QuickLmbda {
  static NNORM_INLINE bool suffices(float power) { return power > 0.5f; }

  // Adds the terms of an element, in units of ln 2, and returns log₂(1 + |h|) with the sign of h.
  static NNORM_INLINE float add_terms(float g, float& signed_log, float& h_d, float& d_sum, float& curvature) {
    const float size = std::fabs(g), u = fused(ln_2, size, 1.0f), length = quick_log2(u), log = with_sign_of(g, length);
    const float grown = u * length, d = grown - size;
    signed_log += log;
    h_d = fused(g, d, h_d);
    d_sum += d;
    curvature = fused(d, fused(-2.0f, size, d), curvature);
    curvature = fused(grown, grown - length, curvature);
    return log;
  }

  static NNORM_INLINE float from(const float (&sums)[4], float inverse_length, float delta) {
    const float unit = inverse_length * ln_2, h_d = unit * ln_2 * sums[1], d = unit * sums[2];
    const float slope = fused(-unit, sums[0], h_d);
    const float curvature = fused(-2.0f * h_d, h_d, fused(-d, d, unit * ln_2 * sums[3]));
    return fused(-slope, quick_reciprocal(curvature + delta), 1.0f);
  }
};

// λ̂ of any row by ForHalf, called as QuickLmbda.
struct AnyLmbda {
  static NNORM_INLINE float add_terms(float g, float& signed_log, float& h_d, float& d_sum, float& curvature) {
    const float h = g * ln_2;
    const Log2<float> log = ForHalf::log2_1p(magnitude(h));
    add_lmbda_terms(h, std::fabs(h), log, signed_log, h_d, d_sum, curvature);
    return with_sign_of(h, log.fraction);
  }

  static NNORM_INLINE float from(const float (&sums)[4], float inverse_length, float delta) {
    return lmbda_of_row(sums, inverse_length, delta);
  }
};

// The same value, which nvcc cannot look into: else it computes with it before it is selected, once for each element.
NNORM_INLINE float opaque(float value) {
#if defined(__CUDA_ARCH__)
  asm("" : "+f"(value));
#endif
  return value;
}

// ψ for exponents between ½ and 2½ and |h| up to 2^40. A series of two terms replaces small powers; 2^z is not clamped.
struct QuickPsi {
  static constexpr float small = 0.03f;  // |h| below which the series is used

  float mean, difference;  // of the exponents: z = log·(mean ± difference)
  float gain_pos, gain_neg, bend_pos, bend_neg;

  static NNORM_INLINE bool suffices(Exponents<float> eta) {
    return eta.pos >= 0.5f && eta.neg >= 0.5f && eta.pos <= 2.5f && eta.neg <= 2.5f;
  }

  static NNORM_INLINE QuickPsi from(Exponents<float> eta) {
    return {0.5f * (eta.pos + eta.neg),
            0.5f * (eta.pos - eta.neg),
            opaque(quick_reciprocal(eta.pos)),
            opaque(-quick_reciprocal(eta.neg)),
            opaque(bend(eta.pos)),
            opaque(bend(eta.neg))};
  }

  // `log` as QuickLmbda::add_terms() returns it.
  NNORM_INLINE float operator()(float g, float log) const {
    const bool negative = g < 0.0f;
    const float size = std::fabs(g), power = quick_exp2(fused(difference, log, mean * std::fabs(log)));
    const float gain = negative ? gain_neg : gain_pos, series = g * fused(size, negative ? bend_neg : bend_pos, ln_2);
    return size < small * per_ln_2 ? series : fused(power, gain, -gain);
  }

 private:
  // ψ = h·(1 + c₁·a + c₂·a² + …). In place of a² stands the line through 0 with the least greatest error for a ≤ small.
  static NNORM_INLINE float bend(float eta) {
    const float c1 = fused(eta, 0.5f, -0.5f), c2 = c1 * fused(eta, 1.0f / 3, -2.0f / 3);
    constexpr float line = 0.828427125f * small;  // 2·(√2 − 1)
    return fused(c2, line, c1) * (ln_2 * ln_2);
  }
};

// weight·ψ(h) + bias in a row of any exponents.
NNORM_INLINE float half_result_of(float g, float log, Branch<float> pos, Branch<float> neg, float weight, float bias) {
  const float h = g * ln_2;
  return result_of<ForHalf, false>(h, ForHalf::log2_1p(std::fabs(h), std::fabs(log)), pos, neg, weight, bias);
}

// BatchNormalNorm. Its exponents are frozen, so that each channel has a limit of |x| below which nothing has to be clamped.

// log₂(u) if a ≥ least, else `series`: on a device the instruction is predicated, which saves a selection.
NNORM_INLINE float quick_log2_from(float least, float a, float u, float series) {
#if defined(__CUDA_ARCH__)
  asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p lg2.approx.ftz.f32 %0, %3;\n}"
      : "+f"(series)
      : "f"(a), "f"(least), "f"(u));
  return series;
#else
  return a >= least ? quick_log2(u) : series;
#endif
}

// 2^z − 1 if `size` ≥ least, else `series`.
NNORM_INLINE float quick_exp2_m1_from(float least, float size, float z, float series) {
#if defined(__CUDA_ARCH__)
  asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p ex2.approx.ftz.f32 %0, %3;\n@p add.rn.f32 %0, %0, 0fBF800000;\n}"
      : "+f"(series)
      : "f"(size), "f"(least), "f"(z));
  return series;
#else
  return size >= least ? quick_exp2(z) - 1.0f : series;
#endif
}

// If in_range, |x| is at most input_limit(), and nothing is clamped. Otherwise x and the exponents may be any numbers. Both
// give the same bits where in_range is true, so that a result does not depend on its neighbors.
template <bool in_range>
struct ForChannels {
  static constexpr int output_divisor = 1;

  static NNORM_INLINE float magnitude(float h) {
    return in_range ? std::fabs(h) : NNORM_INSTRUCTION_SET::magnitude(h);
  }

  static NNORM_INLINE Log2<float> log2_1p(float a) {
    const float grown = 1.0f + a;
    return {-0.0f, quick_log2_from(0.0173f, a, grown, a * fused(grown, -0.71311f, 2.1557873f))};
  }

  static NNORM_INLINE float exp2_m1(Log2<float> log, float eta) {
    const float unbounded = log.fraction * eta, z = in_range ? unbounded : at_most(unbounded, 127.0f);
    const float series = z * fused(z, fused(z, 0.0555041087f, 0.240226507f), 0.693147180f);
    return quick_exp2_m1_from(0x1p-5f, std::fabs(z), z, series);
  }

  static NNORM_INLINE float quotient(float a, float b) { return quick_quotient(a, b); }
};

// The limit of |x| for ForChannels<true>. Below it |h| is at most about 2^31, and z at most 125. The limit is −1 if
// an exponent is greater than 4 or a parameter is NaN.
NNORM_INLINE float input_limit(float scale, float shift, float eta_pos, float eta_neg) {
  const float limit = quick_quotient(0x1p31f - std::fabs(shift), std::fabs(scale));
  return eta_pos <= 4.0f && eta_neg <= 4.0f && limit >= 0.0f ? limit : -1.0f;
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
