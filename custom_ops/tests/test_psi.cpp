// ψ from end to end, through the kernel batch_normal_norm: each row is a channel with its own exponents, weight 1 and bias 0.
#include <cstdio>
#include <string>

#include "check.h"
#include "mathematics_table.h"
#include "oracle.h"

namespace nnorm_test {
namespace {

// In units in the last place; for tiny h in units of the smallest number times 1 + output_divisor/|η|.
template <class Real>
struct Bounds;
template <>
struct Bounds<float> {
  static constexpr double small = 5, moderate = 5, large = 4, any = 5, tiny = 2;
};
template <>
struct Bounds<double> {
  static constexpr double small = 6, moderate = 6, large = 5, any = 5, tiny = 2;
};

// Many values of λ, and exponents that are special cases of a formula.
template <class Real>
void exponents(std::vector<Real>& pos, std::vector<Real>& neg) {
  for (const double lmbda : evenly<double>(-2, 4, sizeof(Real) == 4 ? 481 : 97)) {  // 0, 1 and 2 are among them
    pos.push_back(Real(lmbda));
    neg.push_back(Real(2 - lmbda));
  }
  const double least = double(nnorm::Format<Real>::least_exponent);
  for (const double eta :
       {0.0, 1e-9, 0x1p-30, 0x1p-31, 1e-7, 1e-5, 3e-3, 0.00316227766, 1e-30, least, least / 2, 1e-14})
    for (const double sign : {1.0, -1.0}) {
      pos.push_back(Real(sign * eta));
      neg.push_back(Real(-sign * eta));
    }
}

template <class Real>
std::vector<Real> inputs() {
  Random random(1);
  std::vector<Real> h{0, Real(-0.0)};
  for (const double sign : {1.0, -1.0}) {
    for (const double size : {1e-30, 1e-38, 1e-40, 1e-45, 1e-20, 1.0, 1e4, 1e38, 3e38})
      if (Real(size) != 0) h.push_back(Real(sign * size));
    h.push_back(Real(sign) * std::numeric_limits<Real>::denorm_min());
    h.push_back(Real(sign) * std::numeric_limits<Real>::max());
  }
  const size_t n = sizeof(Real) == 4 ? 4000 : 2000;
  const double least = double(std::numeric_limits<Real>::denorm_min());
  for (size_t i = 0; i < n; ++i) h.push_back(Real(3 * random.normal()));
  for (size_t i = 0; i < n; ++i) h.push_back(Real(random.sign() * random.log_uniform(1e-7, 1e4)));
  for (size_t i = 0; i < n / 2; ++i) h.push_back(Real(random.sign() * random.log_uniform(1e4, 1e38)));
  for (size_t i = 0; i < n / 2; ++i) h.push_back(Real(random.sign() * random.log_uniform(least, 1e-7)));
  return h;
}

// ψ of each h for each pair of exponents, one row for each pair.
template <class Real>
std::vector<Real> psi(const nnorm::InstructionSet& set, const std::vector<Real>& h, const std::vector<Real>& pos,
                      const std::vector<Real>& neg) {
  const size_t channels = pos.size();
  const std::vector<Real> ones(channels, 1), zeros(channels, 0);
  const Real* parameters[] = {ones.data(), zeros.data(), pos.data(), neg.data(), ones.data(), zeros.data()};
  std::vector<Real> table(size_t(nnorm::ChannelField::count) * channels), x, y(channels * h.size());
  const nnorm::KernelTable<Real>& kernels = set.table<Real>();
  kernels.prepare_channels(parameters, channels, 1, table.data());
  for (size_t c = 0; c < channels; ++c) x.insert(x.end(), h.begin(), h.end());
  nnorm::ChannelWork<Real> work{};
  work.x = x.data();
  work.y = y.data();
  work.table = table.data();
  work.table_width = work.period = channels;
  work.size = x.size();
  work.row_length = h.size();
  work.sharing = nnorm::Sharing::row;
  kernels.batch_normal_norm(work, 0, nnorm::count_items(work));
  return y;
}

template <class Real>
void test_accuracy(const std::vector<AvailableInstructionSet>& sets, ErrorTable& table) {
  using Wide = Wider<Real>;
  using B = Bounds<Real>;
  using F = nnorm::Format<Real>;
  // Above this 2^z saturates.
  const double saturation = double(F::exponent_bias) + nnorm::log2_output_divisor;
  // The error that replacing 0 by least_exponent causes in log(1 + |h|), in units in the last place.
  const double of_limit =
      double(F::least_exponent) / 2 * std::log(1e38) * std::ldexp(1.0, std::numeric_limits<Real>::digits);
  const std::string type = sizeof(Real) == 4 ? "float" : "double";
  std::vector<Real> pos, neg;
  exponents(pos, neg);
  const std::vector<Real> h = inputs<Real>();
  std::vector<Wide> reference;
  for (size_t c = 0; c < pos.size(); ++c)
    for (const Real x : h) reference.push_back(true_psi(Wide(x), Wide(x < 0 ? neg[c] : pos[c])));

  for (const AvailableInstructionSet& set : sets) {
    const std::vector<Real> y = psi(*set.kernels, h, pos, neg);
    Worst small, moderate, large, any, limit, tiny;
    for (size_t i = 0; i < y.size(); ++i) {
      const Real x = h[i % h.size()], size = std::fabs(x);
      const Real eta = (x < 0 ? neg : pos)[i / h.size()];
      const bool representable = std::isfinite(Real(reference[i]));
      CHECK(!std::isnan(y[i]) && (!representable || std::isfinite(y[i])),
            "%s: psi(%g) = %g for exponent %g, should be %g", set.name, double(x), double(y[i]), double(eta),
            double(reference[i]));
      CHECK(y[i] == 0 || std::signbit(y[i]) == std::signbit(x), "%s: psi(%g) = %g", set.name, double(x),
            double(y[i]));
      if (size > F::greatest_magnitude || !representable) continue;
      const Real usable = std::max(std::fabs(eta), F::least_exponent);
      if (double(eta) * std::log2(1 + double(size)) > saturation - 0.5) {
        const double least = std::ldexp(0.5, int(saturation) - 1) / double(usable);
        CHECK(std::fabs(double(y[i])) >= least, "%s: psi(%g) = %g for exponent %g is not even %g", set.name,
              double(x), double(y[i]), double(eta), least);
        continue;
      }
      // If h·η is denormal, the absolute error is measured.
      if (size * usable < std::numeric_limits<Real>::min() * nnorm::output_divisor<Real>) {
        const Wide steps = std::numeric_limits<Real>::denorm_min() * (1 + nnorm::output_divisor<Wide> / usable);
        tiny.see(double(std::fabs(Wide(y[i]) - reference[i]) / steps), double(x), double(eta));
        continue;
      }
      Worst& of_range = size <= Real(1e-3)       ? small
                        : size <= 10             ? moderate
                        : size <= Real(1e4)      ? large
                        : std::fabs(eta) <= 1e-6 ? limit
                                                 : any;
      of_range.see(in_ulps(y[i], reference[i]), double(x), double(eta));
    }
    table.add("psi, ULP, |h| <= 1e-3, " + type, B::small, set.name, small);
    table.add("psi, ULP, |h| <= 10, " + type, B::moderate, set.name, moderate);
    table.add("psi, ULP, |h| <= 1e4, " + type, B::large, set.name, large);
    table.add("psi, ULP, |h| > 1e4, " + type, B::any, set.name, any);
    table.add("psi, ULP, |h| > 1e4, eta ~ 0, " + type, 3.5 + of_limit, set.name, limit);
    table.add("psi, least steps, |h eta| tiny, " + type, B::tiny, set.name, tiny);
  }
}

template <class Real>
void test_what_is_no_number(const AvailableInstructionSet& set) {
  const Real greatest = nnorm::Format<Real>::greatest_magnitude;
  const std::vector<Real> h{Real(NAN), Real(-NAN), Real(INFINITY), Real(-INFINITY), greatest, -greatest};
  std::vector<Real> pos, neg;
  exponents(pos, neg);
  const std::vector<Real> y = psi(*set.kernels, h, pos, neg);
  for (size_t c = 0; c < pos.size(); ++c) {
    const Real* result = &y[c * h.size()];
    CHECK(std::isnan(result[0]) && std::isnan(result[1]), "%s: psi(NaN) = %g", set.name, double(result[0]));
    CHECK(result[2] == result[4] && result[3] == result[5],
          "%s: psi(infinity) = %g, %g; of the greatest magnitude %g, %g", set.name, double(result[2]),
          double(result[3]), double(result[4]), double(result[5]));
  }
  // A NaN exponent gives NaN for every h.
  for (const Real result : psi<Real>(*set.kernels, {0, 1, -1}, {Real(NAN)}, {Real(NAN)}))
    CHECK(std::isnan(result), "%s: psi for exponent NaN = %g", set.name, double(result));
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  const std::vector<AvailableInstructionSet> sets = available_instruction_sets();
  ErrorTable table(0.5);
  test_accuracy<float>(sets, table);
  if (have_reference_for_double) test_accuracy<double>(sets, table);
  for (const AvailableInstructionSet& set : sets) {
    test_what_is_no_number<float>(set);
    test_what_is_no_number<double>(set);
  }
  table.print_and_check();
  return finish();
}
