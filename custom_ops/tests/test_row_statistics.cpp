// Verifies what nnorm/row_statistics.h states: 1/√x is rounded correctly for every float, as by the GPU's instruction;
// a chain of sums keeps its rounding errors, and overflows as a sum does.
#include "check.h"
#include "nnorm/row_statistics.h"
#include "oracle.h"

namespace nnorm_test {
namespace {

__extension__ typedef unsigned __int128 Wide;

// Whether y is the float nearest to 1/√x, in integers: x = m·2^e with e even, and half a unit below and above y, squared and
// multiplied by x, are on either side of 1.
bool is_nearest(float x, float y) {
  int of_x, of_y;
  const float significand = std::frexp(x, &of_x), root = std::frexp(y, &of_y);
  const Wide m = Wide(std::ldexp(double(significand), 24)), twice = 2 * Wide(std::ldexp(double(root), 24));
  const int scale = 24 - of_x + 2 * (25 - of_y);  // x·y² = m·twice²/2^scale
  if (scale < 0 || scale > 100) return false;
  const Wide one = Wide(1) << scale, below = (twice - 1) * (twice - 1) * m, above = (twice + 1) * (twice + 1) * m;
  return below <= one && one <= above;
}

// Every significand with an even and an odd exponent; the others have the same digits.
void test_inverse_root() {
  size_t wrong = 0;
  for (uint32_t bits = 0x3f800000; bits < 0x40800000; ++bits) {
    const float x = nnorm::from_bits(int32_t(bits));
    wrong += !is_nearest(x, nnorm::inverse_root(x));
  }
  CHECK(wrong == 0, "%zu of 2^24 floats have another float nearest to 1/sqrt(x)", wrong);
  CHECK(!is_nearest(2, std::nextafter(nnorm::inverse_root(2.0f), 0.0f)), "the float below is not the nearest");
  for (int exponent = -148; exponent < 128; ++exponent) {
    const float x = std::ldexp(1.0f, exponent);
    CHECK(is_nearest(x, nnorm::inverse_root(x)), "2^%d", exponent);
  }
  CHECK(std::isinf(nnorm::inverse_root(0.0f)) && nnorm::inverse_root(INFINITY) == 0, "the ends");
  CHECK(std::isnan(nnorm::inverse_root(NAN)), "NaN");
}

void test_chains() {
  Random random(1);
  for (const int n : {1, 2, 1000, 100000}) {
    nnorm::ChainSum<float> chain{0, 0};
    double exact = 0, size = 0;
    for (int i = 0; i < n; ++i) {
      const float value = float(random.normal() * (i % 7 ? 1 : 1000));
      chain.add(value);
      exact += double(value);
      size += std::fabs(double(value));
    }
    CHECK(std::fabs(double(chain.total()) - exact) <= 0x1p-24 * std::fabs(exact) + 0x1p-40 * size, "%d values: %.9g, not %.9g", n,
          double(chain.total()), exact);
  }
  for (const float value : {INFINITY, -INFINITY, 3e38f}) {
    nnorm::ChainSum<float> chain{0, 0};
    for (int i = 0; i < 3; ++i) chain.add(value);
    CHECK(chain.total() == std::copysign(INFINITY, value), "three times %g are %g",
          double(value), double(chain.total()));
    chain.add(std::copysign(INFINITY, -value));
    CHECK(std::isnan(chain.total()), "%g less infinity is %g", double(value), double(chain.total()));
  }
}

}  // namespace
}  // namespace nnorm_test

int main() {
  nnorm_test::test_inverse_root();
  nnorm_test::test_chains();
  return nnorm_test::finish();
}
