// Verifies every bound that nnorm/mathematics.h states, on every instruction set, against the next wider type.
#include <string>

#include "check.h"
#include "mathematics_table.h"
#include "oracle.h"

namespace nnorm_test {
namespace {

// As stated in the header, for float and for double.
template <class Real>
struct Bounds;
template <>
struct Bounds<float> {
  static constexpr double log2_1p_of_mantissa = 1.5e-7, exp2_m1_of_fraction = 1.5e-7, log2_1p = 1.6e-7;
  static constexpr double rounding_of_z = 6e-8, exp2_m1 = 2.2e-7, gain = 6e-8;
  static constexpr double signed_log = 2.7e-7, d = 3.2e-7, h_d = 3.2e-7, curvature = 7e-7;
};
template <>
struct Bounds<double> {
  static constexpr double log2_1p_of_mantissa = 3.5e-16, exp2_m1_of_fraction = 2e-16, log2_1p = 3.5e-16;
  static constexpr double rounding_of_z = 1.2e-16, exp2_m1 = 3.5e-16, gain = 1.2e-16;
  static constexpr double signed_log = 7e-16, d = 8e-16, h_d = 8e-16, curvature = 1.6e-15;
};

template <class Real>
class FunctionTests {
 public:
  using Wide = Wider<Real>;
  using F = nnorm::Format<Real>;
  using B = Bounds<Real>;

  FunctionTests(const std::vector<AvailableInstructionSet>& sets, ErrorTable& table) : sets_(sets), table_(table) {}

  void run() {
    of_one_argument("log2_1p_of_mantissa", std::sqrt(0.5) - 1, std::sqrt(2.0) - 1, B::log2_1p_of_mantissa,
                    &Functions<Real>::log2_1p_of_mantissa, [](Wide m) { return std::log1p(m) / ln2; });
    of_one_argument("exp2_m1_of_fraction", -0.5, 0.5, B::exp2_m1_of_fraction, &Functions<Real>::exp2_m1_of_fraction,
                    [](Wide f) { return std::expm1(f * ln2); });
    logarithms();
    powers();
    powers_at_the_ends();
    branches();
    terms();
  }

 private:
  static constexpr Wide ln2 = Wide(0.69314718055994530941723212145818L);
  static constexpr size_t samples = sizeof(Real) == 4 ? 400000 : 60000;

  std::string named(const char* function) const {
    return std::string(function) + (sizeof(Real) == 4 ? ", float" : ", double");
  }

  void of_one_argument(const char* name, double low, double high, double bound,
                       void (*Functions<Real>::*function)(const Real*, size_t, Real*), Wide (*reference)(Wide)) {
    std::vector<Real> x = evenly<Real>(low, high, samples);
    Random random(1);
    for (size_t i = 0; i < samples / 4; ++i) x.push_back(Real(random.sign() * random.log_uniform(1e-37, 0.29)));
    std::vector<Wide> expected(x.size());
    for (size_t i = 0; i < x.size(); ++i) expected[i] = reference(Wide(x[i]));
    std::vector<Real> result(x.size());
    for (const AvailableInstructionSet& set : sets_) {
      (set.mathematics->functions(Real()).*function)(x.data(), x.size(), result.data());
      Worst worst;
      for (size_t i = 0; i < x.size(); ++i) worst.see(relative_error(result[i], expected[i]), x[i]);
      table_.add(named(name), bound, set.name, worst);
    }
  }

  // Numbers of every size, more of them where the integer of the logarithm changes.
  std::vector<Real> magnitudes() const {
    Random random(2);
    std::vector<Real> a{0, std::numeric_limits<Real>::denorm_min(), std::numeric_limits<Real>::min(),
                        F::greatest_magnitude};
    for (size_t i = 0; i < samples; ++i) a.push_back(Real(random.log_uniform(1e-5, 1e5)));
    for (size_t i = 0; i < samples / 4; ++i)
      a.push_back(Real(random.log_uniform(1e-45, double(F::greatest_magnitude))));
    for (int k = 0; k < 60; ++k)
      for (int step = -50; step <= 50; ++step)
        a.push_back(Real(std::ldexp(std::sqrt(2.0), k) - 1) * (1 + Real(step) * std::numeric_limits<Real>::epsilon()));
    return a;
  }

  void logarithms() {
    std::vector<Real> a = magnitudes();
    const size_t measured = a.size();
    const Real beyond[] = {Real(1.5) * F::greatest_magnitude, std::numeric_limits<Real>::max(), Real(INFINITY),
                           Real(NAN)};
    a.insert(a.end(), std::begin(beyond), std::end(beyond));
    std::vector<Wide> expected(measured);
    for (size_t i = 0; i < measured; ++i) expected[i] = std::log1p(Wide(a[i])) / ln2;
    std::vector<Real> integer(a.size()), fraction(a.size());
    for (const AvailableInstructionSet& set : sets_) {
      set.mathematics->functions(Real()).log2_1p(a.data(), a.size(), integer.data(), fraction.data());
      Worst worst;
      for (size_t i = 0; i < measured; ++i) {
        const Wide sum = Wide(integer[i]) + Wide(fraction[i]);
        worst.see(double(std::fabs(sum - expected[i]) / std::max(expected[i], Wide(std::numeric_limits<Real>::min()))),
                  a[i]);
        CHECK(integer[i] == std::floor(integer[i]) && std::fabs(fraction[i]) <= Real(0.500001),
              "%s: log2_1p(%.9g) = %.9g + %.9g", set.name, double(a[i]), double(integer[i]), double(fraction[i]));
      }
      table_.add(named("log2_1p"), B::log2_1p, set.name, worst);
      CHECK(integer[0] == 0 && fraction[0] == 0, "%s: log2_1p(0) = %g + %g", set.name, double(integer[0]),
            double(fraction[0]));
      for (size_t i = measured; i + 1 < a.size(); ++i)
        CHECK(integer[i] == integer[3] && fraction[i] == fraction[3],
              "%s: log2_1p(%g) is not that of the greatest magnitude", set.name, double(a[i]));
      CHECK(std::isnan(integer.back() + fraction.back()), "%s: log2_1p(NaN) = %g + %g", set.name,
            double(integer.back()), double(fraction.back()));
    }
  }

  void powers() {
    const std::vector<Real> a = magnitudes();
    Random random(3);
    std::vector<Real> eta(a.size());
    for (Real& value : eta) {
      const double just_above_a_power =
          std::ldexp(1 + 1e-3 * random.uniform(), int(random.below(6)) - 4);  // the greatest rounding errors
      const double sizes[] = {random.uniform(0, 4), random.log_uniform(double(F::least_exponent), 4),
                              just_above_a_power};
      value = Real(random.sign() * sizes[random.below(3)]);
    }
    const size_t n = a.size();
    std::vector<Real> integer(n), fraction(n), result(n), bounded(n);
    const double saturation = double(F::exponent_bias) + nnorm::log2_output_divisor;
    for (const AvailableInstructionSet& set : sets_) {
      const Functions<Real>& functions = set.mathematics->functions(Real());
      functions.log2_1p(a.data(), n, integer.data(), fraction.data());
      functions.exp2_m1(integer.data(), fraction.data(), eta.data(), n, result.data());
      functions.bounded_exp2_m1(integer.data(), fraction.data(), eta.data(), n, bounded.data());
      Worst worst;
      for (size_t i = 0; i < n; ++i) {
        const Wide log = Wide(integer[i]) + Wide(fraction[i]), z = Wide(eta[i]) * log;
        if (std::fabs(double(z)) <= double(F::exponent_bias) - 2)
          CHECK(bounded[i] == result[i], "%s: exp2_m1(%g) = %g if bounded, else %g", set.name, double(z),
                double(bounded[i]), double(result[i]));
        if (std::fabs(double(z)) >= saturation) continue;
        // Computed as 2^whole·2^part − 1: the wider type cannot represent z exactly.
        const Wide whole = std::nearbyint(z);
        const Wide part = (Wide(eta[i]) * Wide(integer[i]) - whole) + Wide(eta[i]) * Wide(fraction[i]);
        const Wide scale = std::ldexp(Wide(1), int(whole)), minus_one = std::expm1(part * ln2) * scale + (scale - 1);
        const Wide expected = minus_one / nnorm::output_divisor<Real>;
        // The error that the rounding of z may cause is subtracted first.
        const Wide of_z = Wide(B::rounding_of_z) * std::min(std::fabs(Wide(eta[i])), 2 * std::fabs(z)) * ln2 *
                          (minus_one + 1) / nnorm::output_divisor<Real>;
        const Wide error = std::fabs(Wide(result[i]) - expected);
        worst.see(double(std::max(error - of_z, Wide(0)) / std::max(std::fabs(expected), least_normal)), a[i], eta[i]);
      }
      table_.add(named("exp2_m1"), B::exp2_m1, set.name, worst);
    }
  }

  void powers_at_the_ends() {
    const Real limit = std::ldexp(Real(1), F::mantissa_bits - 1),
               inside = Real(F::exponent_bias + nnorm::log2_output_divisor);
    const Real most = inside - 1;  // an integer that a logarithm may have
    const std::vector<Real> integer{inside, most, most, most, most, most, most, 1, Real(NAN), 0, 0, 0};
    const std::vector<Real> fraction{0, Real(0.3), Real(-0.3), 0, 0, Real(0.4), Real(-0.4), 0, 0, Real(NAN), 0, 0};
    const std::vector<Real> eta{1,  2,          limit * Real(0.999) / inside, limit / inside, -limit / inside,
                                -2, Real(-1.5), Real(NAN),                    1,              1,
                                1,  -3};
    std::vector<Real> result(integer.size());
    for (const AvailableInstructionSet& set : sets_) {
      set.mathematics->functions(Real()).exp2_m1(integer.data(), fraction.data(), eta.data(), integer.size(),
                                                    result.data());
      for (size_t i = 0; i < integer.size(); ++i) {
        const double z = double(eta[i]) * (double(integer[i]) + double(fraction[i])), seen = double(result[i]);
        const double saturated = std::ldexp(1.0, int(F::exponent_bias) - 1),
                     least = -1.0 / nnorm::output_divisor<double>;
        const bool ok = std::isnan(z) ? std::isnan(seen)
                        : z > 0       ? std::isfinite(seen) && seen >= saturated
                        : z < 0       ? seen == least
                                      : seen == 0;
        CHECK(ok, "%s: exp2_m1(%g) = %g", set.name, z, seen);
      }
    }
  }

  void branches() {
    Random random(4);
    std::vector<Real> eta{
        0,         Real(-0.0), F::least_exponent / 2, -F::least_exponent / 2, F::greatest_exponent * 2,
        Real(NAN), 1,          Real(-INFINITY)};
    for (int i = 0; i < 2000; ++i)
      eta.push_back(Real(random.sign() * random.log_uniform(double(F::least_exponent), double(F::greatest_exponent))));
    std::vector<Real> weight(eta.size()), sign(eta.size()), usable(eta.size()), gain(eta.size());
    constexpr Real largest = std::numeric_limits<Real>::max();
    for (size_t i = 0; i < eta.size(); ++i)  // output_divisor·weight is infinite for the largest weights, the gain is finite
      weight[i] = std::fabs(eta[i]) > 2 && i % 2 ? largest * Real(random.uniform(0.5, 1)) : Real(random.normal());
    for (Real& value : sign) value = Real(random.sign());
    for (const AvailableInstructionSet& set : sets_) {
      set.mathematics->functions(Real()).branch(eta.data(), weight.data(), sign.data(), eta.size(), usable.data(),
                                                   gain.data());
      Worst worst;
      for (size_t i = 0; i < eta.size(); ++i) {
        const Real size = std::min(std::max(std::fabs(eta[i]), F::least_exponent), F::greatest_exponent);
        const bool same = std::isnan(eta[i]) ? std::isnan(usable[i]) && std::isnan(gain[i])
                                             : usable[i] == std::copysign(size, eta[i]);
        CHECK(same, "%s: usable_exponent(%g) = %g", set.name, double(eta[i]), double(usable[i]));
        if (std::isnan(eta[i])) continue;
        const Wide expected = Wide(sign[i]) * nnorm::output_divisor<Real> * Wide(weight[i]) / Wide(usable[i]);
        worst.see(relative_error(gain[i], expected), double(eta[i]), double(weight[i]));
      }
      table_.add(named("branch, gain"), B::gain, set.name, worst);
    }
  }

  void terms() {
    Random random(5);
    std::vector<Real> h;
    for (size_t i = 0; i < samples; ++i) h.push_back(Real(random.normal()));
    for (size_t i = 0; i < samples; ++i) h.push_back(Real(random.sign() * random.log_uniform(1e-6, 1e4)));
    const size_t n = h.size();
    std::vector<Real> integer(n), fraction(n), signed_log, h_d, d, curvature;
    for (const AvailableInstructionSet& set : sets_) {
      const Functions<Real>& functions = set.mathematics->functions(Real());
      functions.log2_1p(h.data(), n, integer.data(), fraction.data());
      for (auto* sum : {&signed_log, &h_d, &d, &curvature}) sum->assign(n, 0);
      functions.add_lmbda_terms(h.data(), integer.data(), fraction.data(), n, signed_log.data(), h_d.data(), d.data(),
                                curvature.data());
      Worst of_log, of_d, of_h_d, of_curvature;
      for (size_t i = 0; i < n; ++i) {
        const Wide x = std::fabs(Wide(h[i])), t = std::log1p(x), grown = (1 + x) * t, true_d = grown - x;
        const Wide bend = x * (grown * t - 2 * true_d) + true_d * true_d;
        of_log.see(relative_error(signed_log[i], std::copysign(t, Wide(h[i]))), h[i]);
        of_d.see(double(std::fabs(d[i] - true_d) / grown), h[i]);
        of_h_d.see(double(std::fabs(h_d[i] - Wide(h[i]) * true_d) / (x * grown)), h[i]);
        of_curvature.see(double(std::fabs(curvature[i] - bend) / (grown * grown)), h[i]);
      }
      table_.add(named("add_lmbda_terms, signed_log"), B::signed_log, set.name, of_log);
      table_.add(named("add_lmbda_terms, d"), B::d, set.name, of_d);
      table_.add(named("add_lmbda_terms, h_d"), B::h_d, set.name, of_h_d);
      table_.add(named("add_lmbda_terms, curvature"), B::curvature, set.name, of_curvature);
    }
  }

  static constexpr Wide least_normal = Wide(std::numeric_limits<Real>::min());
  const std::vector<AvailableInstructionSet>& sets_;
  ErrorTable& table_;
};

// The error of λ̂ from given sums, relative to the error that rounding the sums causes.
void test_estimate_lmbda(const AvailableInstructionSet& set, ErrorTable& table) {
  Random random(6);
  Worst worst;
  for (int i = 0; i < 20000; ++i) {
    const double n = double(1 + random.below(100000)), delta = random.below(2) ? 0.00316 : 0;
    const double signed_log = random.normal() * n, h_d = random.normal() * n, d = random.uniform() * n;
    const double curvature = random.uniform(-3, 3) * n;
    using Wide = long double;
    const Wide a = Wide(h_d) / n, b = Wide(d) / n, c = Wide(signed_log) / n, e = Wide(curvature) / n;
    const Wide slope = a - c, damped = e - b * b - 2 * a * a + delta;
    const Wide condition = 1 + (std::fabs(a) + std::fabs(c)) / std::fabs(damped) +
                           std::fabs(slope) * (std::fabs(e) + b * b + 2 * a * a + delta) / (damped * damped);
    const double lmbda = set.mathematics->estimate_lmbda(signed_log, h_d, d, curvature, n, delta);
    worst.see(double(std::fabs(lmbda - (1 - slope / damped)) / condition), signed_log, h_d);
  }
  table.add("estimate_lmbda, over its condition", 3e-16, set.name, worst);
  const auto estimate = set.mathematics->estimate_lmbda;
  CHECK(estimate(0, 0, 0, 0, 5, 0) == 1, "%s: a row without spread", set.name);
  CHECK(estimate(0, 0, 0, 0, 5, 0.003) == 1, "%s: a row without spread, damped", set.name);
  CHECK(std::isnan(estimate(NAN, NAN, NAN, NAN, 5, 0)), "%s: a row with NaN", set.name);
}

void test_resolve_exponents(const AvailableInstructionSet& set, ErrorTable& table) {
  Random random(7);
  Worst worst;
  const double sqrt_eps = std::sqrt(1e-5);
  std::vector<double> lmbdas{0, 1, 2, -0.0, sqrt_eps, -sqrt_eps, 2 - sqrt_eps, 2 + sqrt_eps, 1e-9, 3e-3, 1e30, -1e30};
  for (int i = 0; i < 5000; ++i) lmbdas.push_back(random.uniform(-3, 5));
  for (const double delta : {0.0, sqrt_eps})
    for (const double lmbda : lmbdas) {
      double eta[2];
      set.mathematics->resolve_exponents(lmbda, delta, &eta[0], &eta[1]);
      for (int i = 0; i < 2; ++i) {
        const long double expected = true_exponent<long double>(lmbda, i ? -1 : 1, delta);
        CHECK(double(expected) != 0 || eta[i] == 0, "%s: lambda %.17g, delta %g: exponent %g", set.name, lmbda,
              delta, eta[i]);
        worst.see(relative_error(eta[i], expected), lmbda, delta);
      }
    }
  table.add("resolve_exponents", 2.3e-16, set.name, worst);
  double eta[2];
  set.mathematics->resolve_exponents(NAN, sqrt_eps, &eta[0], &eta[1]);
  CHECK(std::isnan(eta[0]) && std::isnan(eta[1]), "%s: exponents of NaN are %g, %g", set.name, eta[0], eta[1]);
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  const std::vector<AvailableInstructionSet> sets = available_instruction_sets();
  ErrorTable table(0.45);
  FunctionTests<float>(sets, table).run();
  if (have_reference_for_double) {
    FunctionTests<double>(sets, table).run();
    for (const AvailableInstructionSet& set : sets) test_estimate_lmbda(set, table);
    for (const AvailableInstructionSet& set : sets) test_resolve_exponents(set, table);
  }
  table.print_and_check();
  return finish();
}
