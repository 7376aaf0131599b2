// half_mathematics.h keeps its bounds on any device whose instructions have at most the errors that NVIDIA documents.
// Here they have the greatest documented errors, in the worst directions.
#include "check.h"
#include "nnorm/channel.h"
#include "nnorm/half_mathematics.h"
#include "nnorm/number_types.h"
#include "oracle.h"

namespace nnorm_test {
namespace {

using nnorm::Branch;
using nnorm::Channel;
using nnorm::ForChannels;
using nnorm::ForHalf;
using nnorm::Log2;

constexpr float stated_error = 0x1p-22f;

float psi_of(float h, float eta) {
  const Branch<float> branch = nnorm::branch<ForHalf>(eta, 1.0f, h < 0 ? -1.0f : 1.0f);
  return branch.gain * ForHalf::exp2_m1(ForHalf::log2_1p(nnorm::magnitude(h)), branch.eta);
}

template <bool in_range>
float psi_of_channel(float h, float eta) {
  using Evaluation = ForChannels<in_range>;
  const Channel<float> channel = nnorm::channel_from<Evaluation>(1.0f, 0.0f, eta, eta, 1.0f, 0.0f);
  float same_h, integer, fraction;
  nnorm::logarithm<Evaluation>(h, channel, same_h, integer, fraction);
  return nnorm::weighted_psi<Evaluation>(same_h, integer, fraction, channel);
}

// Each way to compute ψ, and the |h| that it is for.
struct Way {
  const char* name;
  float (*psi)(float h, float eta);
  double greatest_h;
};
constexpr double greatest_h_in_range = 0x1p31;
constexpr Way ways[] = {{"psi for 16 bits", psi_of, 1e37},
                        {"psi of channels", psi_of_channel<false>, 1e37},
                        {"psi of channels, in range", psi_of_channel<true>, greatest_h_in_range}};

// Calls f for all numbers of float16, for numbers of any size, and for numbers around those where a series ends.
template <class F>
void for_numbers(const Way& way, float eta, Random& random, F f) {
  for (uint32_t bits = 0; bits < 1u << 16; bits += eta == 0 || eta == 1 || eta == 2 ? 1 : 61)
    f(nnorm::widened(nnorm::Float16{uint16_t(bits)}));
  for (int i = 0; i < 5000; ++i)
    f(float(random.sign() * random.log_uniform(i % 2 ? 1e-3 : 1e-30, i % 2 ? 1e3 : way.greatest_h)));
  const double series_of_exp2 = std::expm1(0x1p-5 / std::fabs(double(eta)) * std::log(2));
  for (const double a : {0x1p-6, 0.0173, std::fmin(series_of_exp2, way.greatest_h)})
    for (int i = 0; i < 500; ++i) f(float(random.sign() * random.uniform(0.98, 1.02) * a));
}

std::vector<float> exponents(Random& random) {
  std::vector<float> etas{0, 1, 2, 4, 1e-30f, 1e-8f, 1e-4f, -1, -2, -1e-30f, -1e-3f};
  while (etas.size() < 200)
    etas.push_back(float(random.below(3) ? random.uniform(-2, 4) : random.sign() * random.log_uniform(1e-9, 1)));
  return etas;
}

void test_psi(ErrorTable& errors, const Way& way) {
  Random random(1);
  const std::vector<float> etas = exponents(random);
  for (const float log2_direction : {-1.0f, 1.0f})
    for (const float exp2_direction : {-1.0f, 1.0f}) {
      nnorm::quick_log2_error = log2_direction * stated_error;
      nnorm::quick_exp2_error = exp2_direction * stated_error;
      Worst worst;
      for (const float eta : etas) {
        for_numbers(way, eta, random, [&](float h) {
          if (!(std::fabs(double(h)) <= way.greatest_h)) return;  // infinity, NaN
          const double reference = true_psi(double(h), double(eta));
          const bool saturated = std::fabs(reference * double(eta)) > 0x1p127, normal = std::fabs(reference) > 0x1p-126;
          if (!saturated && normal) worst.see(relative_error(way.psi(h, eta), reference), double(h), double(eta));
        });
      }
      errors.add(way.name, 0x1p-15, exp2_direction * log2_direction > 0 ? "alike" : "against", worst);
    }
  nnorm::quick_log2_error = nnorm::quick_exp2_error = 0;
  for (const float eta : {-2.0f, 0.0f, 1.5f, 4.0f}) {
    CHECK(std::isnan(way.psi(NAN, eta)), "%s: psi(NaN; %g)", way.name, double(eta));
    CHECK(way.psi(0.0f, eta) == 0 && way.psi(-0.0f, eta) == 0, "%s: psi(0; %g)", way.name, double(eta));
    if (way.greatest_h < greatest_h_in_range * 2) continue;
    CHECK(!std::isnan(way.psi(INFINITY, eta)) && !std::isnan(way.psi(-INFINITY, eta)), "%s: psi(±infinity; %g) is NaN",
          way.name, double(eta));
  }
}

// A result does not depend on the other elements of its access.
void test_that_ways_agree() {
  Random random(4);
  size_t different = 0;
  for (const float eta : exponents(random))
    for_numbers(ways[2], eta, random, [&](float h) {
      if (!(std::fabs(double(h)) <= greatest_h_in_range)) return;
      different += nnorm::bits_of(psi_of_channel<true>(h, eta)) != nnorm::bits_of(psi_of_channel<false>(h, eta));
    });
  CHECK(different == 0, "%zu results depend on the range", different);
}

// Up to the limit, and a unit of bfloat16 above it, nothing saturates. No greater limit is possible by more than that.
void test_input_limit() {
  Random random(3);
  for (const float direction : {-1.0f, 0.0f, 1.0f}) {
    nnorm::quick_exp2_error = direction * stated_error;
    for (int i = 0; i < 20000; ++i) {
      const float scale = float(random.sign() * random.log_uniform(1e-8, 1e8));
      const float shift = float(random.normal() * random.log_uniform(1e-6, 1e6));
      const float pos = float(random.uniform(-2, 4)), neg = float(random.uniform(-2, 4));
      const float limit = nnorm::input_limit(scale, shift, pos, neg);
      const double exact = (greatest_h_in_range - std::fabs(double(shift))) / std::fabs(double(scale));
      CHECK(std::fabs(double(limit) / exact - 1) < 1e-6, "limit %g of (%g, %g), not %g", double(limit), double(scale),
            double(shift), exact);
      const float x = std::copysign(limit * (1 + 0x1p-8f), scale * shift), h = nnorm::fused(scale, x, shift);
      for (const float eta : {pos, neg, 4.0f}) {
        const float grown = ForChannels<true>::exp2_m1(ForChannels<true>::log2_1p(std::fabs(h)), eta);
        CHECK(grown < 0x1p126f, "psi(%g; %g) saturates", double(h), double(eta));
      }
    }
  }
  nnorm::quick_exp2_error = 0;
  const auto none = [](float scale, float shift, float pos, float neg) {
    CHECK(nnorm::input_limit(scale, shift, pos, neg) == -1, "a limit of (%g, %g, %g, %g)", double(scale), double(shift),
          double(pos), double(neg));
  };
  for (const float bad : {NAN, 4.5f, INFINITY}) {
    none(1, 0, bad, 1);
    none(1, 0, 1, bad);
  }
  none(NAN, 0, 1, 1);
  none(1, NAN, 1, 1);
  none(1, INFINITY, 1, 1);
  none(1, 1e30f, 1, 1);
  CHECK(nnorm::input_limit(0, 1, 0, 2) > 1e30f, "no limit for scale 0");
  CHECK(nnorm::input_limit(INFINITY, 1, 0, 2) == 0, "a limit for infinite scale");
}

// The errors of the logarithms move λ̂ in one direction, or in random directions.
void test_lmbda(ErrorTable& errors) {
  Random random(2);
  Worst worst;
  for (int i = 0; i < 2000; ++i) {
    const size_t n = 64 + random.below(2000);
    std::vector<double> h(n);
    double mean = 0, variance = 0;
    for (double& value : h) {
      value = i % 3 == 0 ? random.normal() : i % 3 == 1 ? random.uniform() : -std::log(random.uniform());
      mean += value / double(n);
    }
    for (const double value : h) variance += (value - mean) * (value - mean) / double(n);
    for (double& value : h) value = double(float((value - mean) / std::sqrt(variance)));
    nnorm::LmbdaSums<double> means{0, 0, 0, 0};
    for (const double value : h) {
      const double direction = i % 5 == 0 ? random.sign() : (i % 2 ? 1 : -1) * (i % 5 < 3 ? std::copysign(1, value) : 1);
      nnorm::quick_log2_error = float(direction) * stated_error;
      const float a = nnorm::magnitude(float(value));
      const Log2<float> log = ForHalf::log2_1p(a);
      nnorm::LmbdaSums<float> terms{0, 0, 0, 0};
      nnorm::add_lmbda_terms(float(value), a, log, terms.signed_log, terms.h_d, terms.d, terms.curvature);
      means.signed_log += double(terms.signed_log) / double(n);
      means.h_d += double(terms.h_d) / double(n);
      means.d += double(terms.d) / double(n);
      means.curvature += double(terms.curvature) / double(n);
    }
    const double delta = i % 2 ? std::sqrt(1e-5) : 0;
    worst.see(std::fabs(nnorm::estimate_lmbda(means, delta) - true_lmbda(h, delta).lmbda), double(n), double(i));
  }
  nnorm::quick_log2_error = 0;
  errors.add("lambda for 16 bits", 3e-6, "", worst);
}

// The instructions have the greatest documented errors: of log₂ in the direction `log`, of all others in `others`.
void set_errors(double log, double others) {
  nnorm::quick_log2_error = float(log) * stated_error;
  nnorm::quick_exp2_error = float(others) * stated_error;
}

void test_quick_psi(ErrorTable& errors) {
  Random random(3);
  for (const double log2_direction : {-1, 1})
    for (const double exp2_direction : {-1, 1}) {
      set_errors(log2_direction, exp2_direction);
      Worst worst;
      for (int i = 0; i < 1000000; ++i) {
        const float pos = float(random.uniform(0.5, i % 2 ? 1.5 : 2.5)), neg = float(random.uniform(0.5, 2.5));
        const double size =
            i % 3 == 0 ? random.log_uniform(1e-30, 0x1p40) : random.log_uniform(1e-3, i % 3 == 1 ? 0.1 : 100);
        const float g = float(random.sign() * size * double(nnorm::per_ln_2));
        const nnorm::QuickPsi psi = nnorm::QuickPsi::from({pos, neg});
        float terms[4] = {};
        const float log = nnorm::QuickLmbda::add_terms(g, terms[0], terms[1], terms[2], terms[3]);
        const double reference = true_psi(double(g) * std::log(2.0), double(g < 0 ? neg : pos));
        worst.see(relative_error(psi(g, log), reference), double(g) * std::log(2.0), double(g < 0 ? neg : pos));
      }
      errors.add("psi for 16 bits, quick", 0x1p-15, exp2_direction * log2_direction > 0 ? "alike" : "against", worst);
    }
  set_errors(0, 0);
  const nnorm::QuickPsi psi = nnorm::QuickPsi::from({1.5f, 0.5f});
  CHECK(psi(0.0f, 0.0f) == 0 && psi(-0.0f, -0.0f) == 0 && std::isnan(psi(NAN, NAN)), "psi(0) or psi(NaN)");
}

// A row as the kernels compute it (cuda/half_rows.cuh), and what was decided on the way.
struct HalfRow {
  bool one_pass, quick_lmbda, quick_psi;
  float lmbda;
  std::vector<float> g, psi;

  HalfRow(std::vector<float> x, float epsilon, float delta, const std::vector<double>& log_directions, double others) {
    const float inverse_length = 1.0f / float(x.size());
    set_errors(0, others);
    float sums[2];
    sum(x.size(), sums, [&](size_t i, float* part) { nnorm::add_moments(x[i], part[0], part[1]); });
    const nnorm::OnePass pass = nnorm::OnePass::from(sums, inverse_length);
    one_pass = pass.suffices(epsilon);
    nnorm::ScaledStandardization standardize = pass.standardization(epsilon);
    if (!one_pass) {
      const float mean = sums[0] / float(x.size());
      float moments[2];
      sum(x.size(), moments, [&](size_t i, float* part) { nnorm::add_moments(x[i] -= mean, part[0], part[1]); });
      standardize = nnorm::scaled(nnorm::standardization_of(mean, moments, inverse_length, epsilon), epsilon);
    }
    quick_lmbda = nnorm::QuickLmbda::suffices(standardize.power);
    std::vector<float> log(x.size());
    float terms[4];
    sum(x.size(), terms, [&](size_t i, float* part) {
      set_errors(log_directions[i], others);
      g.push_back(standardize(x[i]));
      if (quick_lmbda) {
        log[i] = nnorm::QuickLmbda::add_terms(g[i], part[0], part[1], part[2], part[3]);
      } else {
        const float h = g[i] * nnorm::ln_2;
        const Log2<float> of_h = ForHalf::log2_1p(nnorm::magnitude(h));
        nnorm::add_lmbda_terms(h, std::fabs(h), of_h, part[0], part[1], part[2], part[3]);
        log[i] = nnorm::with_sign_of(h, of_h.fraction);
      }
    });
    if (quick_lmbda) {
      lmbda = nnorm::QuickLmbda::from(terms, inverse_length, delta);
    } else {
      for (float& term : terms) term *= inverse_length;
      lmbda = nnorm::estimate_lmbda(nnorm::LmbdaSums<float>{terms[0], terms[1], terms[2], terms[3]}, delta);
    }
    const nnorm::Exponents<float> eta = nnorm::resolve_exponents(lmbda, delta);
    quick_psi = nnorm::QuickPsi::suffices(eta);
    const nnorm::QuickPsi quick = nnorm::QuickPsi::from(eta);
    const Branch<float> pos = nnorm::branch<ForHalf>(eta.pos, 1.0f, 1.0f);
    const Branch<float> neg = nnorm::branch<ForHalf>(eta.neg, 1.0f, -1.0f);
    for (size_t i = 0; i < x.size(); ++i)
      psi.push_back(quick_psi ? quick(g[i], log[i]) : nnorm::half_result_of(g[i], log[i], pos, neg, 1.0f, 0.0f));
    set_errors(0, 0);
  }

 private:
  // In float32 for each 32 elements, as a thread adds them. The additions of these sums have small errors.
  template <int count, class Add>
  static void sum(size_t n, float (&sums)[count], const Add& add) {
    double total[count] = {};
    for (size_t first = 0; first < n; first += 32) {
      float part[count] = {};
      for (size_t i = first; i < n && i < first + 32; ++i) add(i, part);
      for (int s = 0; s < count; ++s) total[s] += double(part[s]);
    }
    for (int s = 0; s < count; ++s) sums[s] = float(total[s]);
  }
};

// Values of deviation about 1, of shapes that networks have and of others.
enum class Shape { normal, uniform, exponential, two_values, two_values_one_rare, outlier, sparse, lognormal, count };

double draw(Shape shape, double rare, bool first, Random& random) {
  switch (shape) {
    case Shape::normal: return random.normal();
    case Shape::uniform: return random.uniform() * 3.5;
    case Shape::exponential: return -std::log(random.uniform());
    case Shape::two_values: return random.sign();
    case Shape::two_values_one_rare: return random.uniform() < rare ? 3 : 0;
    case Shape::outlier: return first ? random.uniform(10, 300) : random.normal();
    case Shape::sparse: return random.below(10) ? 0 : 3 * random.normal();
    default: return std::exp(1.5 * random.normal());
  }
}

// What the kernels decide about rows, and how often.
struct Decisions {
  long one_pass[2] = {}, quick_lmbda[2] = {}, quick_psi[2] = {};

  void add(const HalfRow& row) {
    one_pass[row.one_pass] += long(row.g.size());
    quick_lmbda[row.quick_lmbda] += long(row.g.size());
    quick_psi[row.quick_psi] += long(row.g.size());
  }
  void check(long least) const {
    for (const auto& [name, counts] :
         {std::pair{"one pass", one_pass}, {"quick lambda", quick_lmbda}, {"quick psi", quick_psi}}) {
      std::printf("%s: %ld elements without, %ld with\n", name, counts[0], counts[1]);
      CHECK(counts[0] >= least && counts[1] >= least, "%s: %ld elements without, %ld with", name, counts[0], counts[1]);
    }
  }
};

void test_rows(ErrorTable& errors) {
  Random random(4);
  Worst of_lmbda, of_condition, of_h, of_psi;
  Decisions decisions;
  for (int i = 0; i < 8000; ++i) {
    const size_t n = i % 10 ? 64 + random.below(1000) : 2 + random.below(62);
    const Shape shape = Shape(i % int(Shape::count));
    const double rare = random.log_uniform(1e-3, 0.5), spread = random.below(3) ? random.log_uniform(0.1, 10) : 1;
    const double mean = (i / 8) % 4 == 0 ? 0 : (i / 8) % 4 == 1 ? random.uniform(-4, 4) : (i / 8) % 4 == 2 ? 30 : 1000;
    const double delta = i % 3 ? std::sqrt(1e-5) : 0;
    const double epsilon = i % 5 ? 1e-5 : random.log_uniform(1e-6, 100) * spread * spread;
    std::vector<float> x(n);
    for (size_t k = 0; k < n; ++k) {  // float16 has 11 bits
      const double value = spread * (mean + draw(shape, rare, k == 0, random));
      const double unit = std::ldexp(1, std::ilogb(value) - 10);
      x[k] = float(std::nearbyint(value / unit) * unit);
    }
    std::vector<double> directions(n);
    for (size_t k = 0; k < n; ++k)
      directions[k] = i % 7 == 0 ? random.sign() : i % 7 == 1 ? (k % 2 ? 1 : -1) : i % 2 ? 1 : -1;
    const HalfRow row(x, float(epsilon), float(delta), directions, i % 4 < 2 ? 1 : -1);
    double true_mean = 0, variance = 0;
    for (const float value : x) true_mean += double(value) / double(n);
    for (const float value : x) variance += (double(value) - true_mean) * (double(value) - true_mean) / double(n);
    const double deviation = std::sqrt(variance + double(float(epsilon)));
    if (variance == 0) continue;
    decisions.add(row);
    std::vector<double> g, h;
    for (size_t k = 0; k < n; ++k) {
      g.push_back(double(row.g[k]) * std::log(2.0));
      h.push_back((double(x[k]) - true_mean) / deviation);
    }
    const auto of_g = true_lmbda(g, double(float(delta))), of_row = true_lmbda(h, double(float(delta)));
    const double error = std::fabs(double(row.lmbda) - of_g.lmbda);
    if (row.quick_lmbda) {
      of_condition.see(error / of_g.condition, double(n), double(i));
      if (shape <= Shape::exponential && n >= 64 && variance > 9 * double(float(epsilon)))
        of_lmbda.see(error, double(n), double(i));
    }
    for (size_t k = 0; k < n && row.one_pass; ++k)
      of_h.see(std::fabs(g[k] - h[k]) / (std::fabs(h[k]) + std::fabs(true_mean) / deviation), double(i), h[k]);
    for (size_t k = 0; k < n; ++k) {
      const double eta = true_exponent(of_row.lmbda, h[k] < 0 ? -1 : 1, double(float(delta)));
      const double psi = true_psi(h[k], eta), error_of_psi = std::fabs(double(row.psi[k]) - psi);
      const double log = std::log1p(std::fabs(h[k])), slope = true_slope(h[k], eta);
      const double size = std::fabs(psi) * (1 + log * (1 + of_row.condition / 100)) +
                          slope * (std::fabs(h[k]) + std::fabs(true_mean) / deviation);
      if (std::fabs(psi * eta) < 0x1p127) of_psi.see(error_of_psi / size, double(i), h[k]);
    }
  }
  decisions.check(100000);
  errors.add("lambda for 16 bits, quick", 3e-6, "", of_lmbda);
  errors.add("lambda for 16 bits, quick, of its condition", 1e-6, "", of_condition);
  errors.add("h of one pass", 4e-6, "", of_h);
  errors.add("rows for 16 bits", 0x1p-15, "", of_psi);
}

// Rows that no formula suffices for become NaN; rows of one value become 0 if ε > 0.
void test_special_rows() {
  for (const size_t n : {1, 2, 100}) {
    const std::vector<double> directions(n, 1);
    for (const float value : {0.0f, 1.0f, -0.3f, 60000.0f, 1e30f, 1e-30f})
      for (const float delta : {0.0f, 3e-3f}) {
        const HalfRow row(std::vector<float>(n, value), 1e-5f, delta, directions, 0);
        for (const float psi : row.psi)
          CHECK(std::fabs(psi) <= 1e-2, "psi is %g in a row of %zu times %g", double(psi), n, double(value));
        const HalfRow of_zeros(std::vector<float>(n, float(int(value))), 0, delta, directions, 0);
        if (std::fabs(value) <= 1)
          for (const float psi : of_zeros.psi) CHECK(std::isnan(psi), "psi is %g without epsilon", double(psi));
      }
    for (const float bad : {NAN, INFINITY, -INFINITY})
      for (const float other : {0.0f, 1.0f, 1000.0f}) {
        std::vector<float> x(n, other);
        for (size_t k = 0; k < n; k += 2) x[k] += 0.5f;
        x[n / 2] = bad;
        const HalfRow row(x, 1e-5f, 0, directions, 0);
        for (const float psi : row.psi) CHECK(std::isnan(psi), "psi is %g beside %g", double(psi), double(bad));
      }
  }
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  ErrorTable errors(0.3);
  for (const Way& way : ways) test_psi(errors, way);
  test_that_ways_agree();
  test_input_limit();
  test_lmbda(errors);
  test_quick_psi(errors);
  test_rows(errors);
  test_special_rows();
  errors.print_and_check();
  return finish();
}
