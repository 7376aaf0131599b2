// half_mathematics.h keeps its bounds on any device whose instructions have at most the errors that NVIDIA documents.
// Here they have the greatest documented errors, in the worst directions.
#include "check.h"
#include "nnorm/half_mathematics.h"
#include "oracle.h"

namespace nnorm_test {
namespace {

using nnorm::Branch;
using nnorm::ForHalf;
using nnorm::Log2;

constexpr float stated_error = 0x1p-22f;

float psi_of(float h, float eta) {
  const Branch<float> branch = nnorm::branch<ForHalf>(eta, 1.0f, h < 0 ? -1.0f : 1.0f);
  return branch.gain * ForHalf::exp2_m1(ForHalf::log2_1p(nnorm::magnitude(h)), branch.eta);
}

void test_psi(ErrorTable& errors) {
  Random random(1);
  std::vector<double> etas{0, 1, 2, -1, 1e-30, -1e-30, 1e-8, 1e-4, -1e-3};
  while (etas.size() < 200) etas.push_back(random.below(3) ? random.uniform(-2, 4) : random.sign() * random.log_uniform(1e-9, 1));
  for (const double log2_direction : {-1, 1})
    for (const double exp2_direction : {-1, 1}) {
      nnorm::quick_log2_error = float(log2_direction) * stated_error;
      nnorm::quick_exp2_error = float(exp2_direction) * stated_error;
      Worst worst;
      for (const double eta : etas)
        for (int i = 0; i < 5000; ++i) {
          const float h = float(random.sign() * random.log_uniform(i % 2 ? 1e-3 : 1e-30, i % 2 ? 1e3 : 1e37));
          const double reference = true_psi(double(h), double(float(eta)));
          const bool saturated = std::fabs(reference * eta) > 0x1p127, normal = std::fabs(reference) > 0x1p-126;
          if (!saturated && normal) worst.see(relative_error(psi_of(h, float(eta)), reference), h, eta);
        }
      errors.add("psi for 16 bits", 0x1p-15, exp2_direction * log2_direction > 0 ? "alike" : "against", worst);
    }
  nnorm::quick_log2_error = nnorm::quick_exp2_error = 0;
  for (const float eta : {-2.0f, 0.0f, 1.5f, 4.0f}) {
    CHECK(std::isnan(psi_of(NAN, eta)), "psi(NaN; %g)", eta);
    CHECK(!std::isnan(psi_of(INFINITY, eta)) && !std::isnan(psi_of(-INFINITY, eta)), "psi(±infinity; %g) is NaN", eta);
    CHECK(psi_of(0.0f, eta) == 0 && psi_of(-0.0f, eta) == 0, "psi(0; %g)", eta);
  }
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
  test_psi(errors);
  test_lmbda(errors);
  errors.print_and_check();
  return finish();
}
