// Conversions of float16 and bfloat16 to float and back: every bit pattern, and floats of every kind, against rounding
// by division. All instruction sets must give the same bits, also of NaN.
#include <cstring>
#include <string>

#include "check.h"
#include "mathematics_table.h"
#include "oracle.h"

namespace nnorm_test {
namespace {

using nnorm::BFloat16;
using nnorm::Float16;

// The two formats, as IEEE 754 defines them.
template <class T>
struct Layout;
template <>
struct Layout<Float16> {
  static constexpr const char* name = "float16";
  static constexpr int mantissa_bits = 10, exponent_bits = 5;
};
template <>
struct Layout<BFloat16> {
  static constexpr const char* name = "bfloat16";
  static constexpr int mantissa_bits = 7, exponent_bits = 8;
};

template <class T>
double decoded(uint16_t bits) {
  using L = Layout<T>;
  const int bias = (1 << (L::exponent_bits - 1)) - 1, most = (1 << L::exponent_bits) - 1;
  const int exponent = (bits >> L::mantissa_bits) & most, mantissa = bits & ((1 << L::mantissa_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == most) return mantissa ? double(NAN) : sign * INFINITY;
  const int whole = exponent ? mantissa + (1 << L::mantissa_bits) : mantissa;
  return sign * std::ldexp(double(whole), std::max(exponent, 1) - bias - L::mantissa_bits);
}

// The nearest number of the format, to even in a tie; infinity from half a step above the greatest number on.
template <class T>
double rounded(double value) {
  using L = Layout<T>;
  if (value == 0 || !std::isfinite(value)) return value;
  const int bias = (1 << (L::exponent_bits - 1)) - 1;
  const double step = std::ldexp(1.0, std::max(std::ilogb(value), 1 - bias) - L::mantissa_bits);
  const double result = std::nearbyint(value / step) * step;
  return std::fabs(result) >= std::ldexp(1.0, bias + 1) ? std::copysign(INFINITY, value) : result;
}

float float_from(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_from(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <class T>
std::vector<T> every_pattern() {
  std::vector<T> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i].bits = uint16_t(i);
  return all;
}

template <class T>
void test_every_pattern(const AvailableInstructionSet& set) {
  const std::vector<T> all = every_pattern<T>();
  std::vector<float> wide(all.size());
  std::vector<T> back(all.size());
  set.mathematics->of(T()).widened(all.data(), all.size(), wide.data());
  set.mathematics->of(T()).narrow(wide.data(), all.size(), back.data());
  for (size_t i = 0; i < all.size(); ++i) {
    float alone;  // elements that do not fill a vector are converted by other code
    set.mathematics->of(T()).widened(&all[i], 1, &alone);
    CHECK(alone == wide[i] || (std::isnan(alone) && std::isnan(wide[i])), "%s %s: %04zx is %g in a tile, %g alone",
          set.name, Layout<T>::name, i, double(wide[i]), double(alone));
    const double expected = decoded<T>(uint16_t(i));
    const bool negative = i >> 15;
    if (std::isnan(expected)) {
      CHECK(std::isnan(wide[i]) && std::isnan(decoded<T>(back[i].bits)) && negative == bool(back[i].bits >> 15),
            "%s %s: NaN %04zx becomes %g and then %04x", set.name, Layout<T>::name, i, double(wide[i]),
            back[i].bits);
      continue;
    }
    CHECK(double(wide[i]) == expected && std::signbit(wide[i]) == negative, "%s %s: %04zx is %g, should be %g",
          set.name, Layout<T>::name, i, double(wide[i]), expected);
    CHECK(back[i].bits == all[i].bits, "%s %s: %04zx comes back as %04x", set.name, Layout<T>::name, i,
          back[i].bits);
  }
}

// Every number of the format, every tie between two neighbors, the floats next to each of these, and any others.
template <class T>
std::vector<float> floats() {
  std::vector<float> result{0.0f,
                            -0.0f,
                            INFINITY,
                            -INFINITY,
                            std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::min()};
  for (const uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fc00000u, 0xffffffffu, 0x7f80ffffu, 0x7fbfffffu, 0x7fffffffu})
    result.push_back(float_from(nan));
  for (size_t i = 0; i < 65536; ++i) {
    const double here = decoded<T>(uint16_t(i));
    if (!std::isfinite(here)) continue;
    double next = decoded<T>(uint16_t(i + 1));
    if (!std::isfinite(next)) next = std::copysign(std::ldexp(1.0, 1 << (Layout<T>::exponent_bits - 1)), here);
    for (const float value : {float(here), float((here + next) / 2)})
      for (const int step : {-1, 0, 1}) {
        const float near = float_from(bits_from(value) + uint32_t(step));
        if (std::isfinite(near)) result.push_back(near);
      }
  }
  Random random(1);
  for (int i = 0; i < 400000; ++i) result.push_back(float_from(uint32_t(random.below(size_t(1) << 32))));
  return result;
}

template <class T>
void test_rounding(const std::vector<AvailableInstructionSet>& sets) {
  const std::vector<float> values = floats<T>();
  std::vector<T> narrow(values.size()), first;
  for (const AvailableInstructionSet& set : sets) {
    const auto convert = set.mathematics->of(T()).narrow;
    convert(values.data(), values.size(), narrow.data());
    for (size_t i = 0; i < values.size(); ++i) {
      const double expected = rounded<T>(values[i]), result = decoded<T>(narrow[i].bits);
      const bool sign_kept = bool(narrow[i].bits >> 15) == std::signbit(values[i]);
      CHECK(sign_kept && (std::isnan(expected) ? std::isnan(result) : result == expected),
            "%s %s: %.9g (%08x) becomes %g, should be %g", set.name, Layout<T>::name, double(values[i]),
            bits_from(values[i]), result, expected);
      if (!first.empty())
        CHECK(narrow[i].bits == first[i].bits, "%s %s: %08x becomes %04x, with %s %04x", set.name, Layout<T>::name,
              bits_from(values[i]), narrow[i].bits, sets[0].name, first[i].bits);
      T alone;  // elements that do not fill a vector are converted by other code
      convert(&values[i], 1, &alone);
      CHECK(alone.bits == narrow[i].bits, "%s %s: %08x becomes %04x in a tile, %04x alone", set.name,
            Layout<T>::name, bits_from(values[i]), narrow[i].bits, alone.bits);
    }
    if (first.empty()) first = narrow;
  }
}

// float and double stay unchanged, including the bits of NaN.
template <class Real>
void test_unchanged(const AvailableInstructionSet& set) {
  const std::vector<Real> values{
      0, Real(-0.0), Real(1.1), std::numeric_limits<Real>::denorm_min(), Real(INFINITY), Real(-NAN)};
  std::vector<Real> wide(values.size()), back(values.size());
  set.mathematics->of(Real()).widened(values.data(), values.size(), wide.data());
  set.mathematics->of(Real()).narrow(wide.data(), values.size(), back.data());
  CHECK(std::memcmp(values.data(), back.data(), values.size() * sizeof(Real)) == 0, "%s: %zu bytes", set.name,
        sizeof(Real));
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  const std::vector<AvailableInstructionSet> sets = available_instruction_sets();
  for (const AvailableInstructionSet& set : sets) {
    test_every_pattern<Float16>(set);
    test_every_pattern<BFloat16>(set);
    test_unchanged<float>(set);
    test_unchanged<double>(set);
  }
  test_rounding<Float16>(sets);
  test_rounding<BFloat16>(sets);
  return finish();
}
