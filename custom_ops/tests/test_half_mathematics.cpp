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
}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  ErrorTable errors(0.3);
  for (const Way& way : ways) test_psi(errors, way);
  test_that_ways_agree();
  test_input_limit();
  test_lmbda(errors);
  errors.print_and_check();
  return finish();
}
