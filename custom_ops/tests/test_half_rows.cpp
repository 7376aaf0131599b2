// Rows of LayerNormalNorm by the quick formulas of half_mathematics.h: its bounds hold on any device whose instructions have
// at most the errors that NVIDIA documents. Here they have the greatest documented errors, in the worst directions.
#include "check.h"
#include "nnorm/half_mathematics.h"
#include "oracle.h"

namespace nnorm_test {
namespace {

using nnorm::Branch;
using nnorm::ForHalf;

constexpr float stated_error = 0x1p-22f;

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
      log[i] = quick_lmbda ? nnorm::QuickLmbda::add_terms(g[i], part[0], part[1], part[2], part[3])
                           : nnorm::AnyLmbda::add_terms(g[i], part[0], part[1], part[2], part[3]);
    });
    lmbda = quick_lmbda ? nnorm::QuickLmbda::from(terms, inverse_length, delta)
                        : nnorm::AnyLmbda::from(terms, inverse_length, delta);
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
    const double epsilon = i % 5 < 3 ? 1e-5 : random.log_uniform(1e-6, 100) * spread * spread;
    std::vector<float> x(n);
    for (size_t k = 0; k < n; ++k) {  // float16 has 11 bits
      const double value = spread * (mean + draw(shape, rare, k == 0, random));
      const double unit = value == 0 ? 1 : std::ldexp(1, std::ilogb(value) - 10);
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
    for (const float huge : {1e25f, 1e38f})  // bfloat16 has them; the variance is infinite
      for (const float delta : {0.0f, 3e-3f}) {
        std::vector<float> x(n, huge);
        for (size_t k = 0; k < n; k += 2) x[k] = -huge;
        const HalfRow row(x, 1e-5f, delta, directions, 0);
        for (const float psi : row.psi)
          CHECK(n == 1 || psi == 0, "psi is %g in a row of %zu times %g and its negative", double(psi), n, double(huge));
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
  test_quick_psi(errors);
  test_rows(errors);
  test_special_rows();
  errors.print_and_check();
  return finish();
}
