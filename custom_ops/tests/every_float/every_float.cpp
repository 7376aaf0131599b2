// Compares ψ of every number of a type, as the kernels of BatchNormalNorm compute it at many exponents, with the C
// library.
//
//   every_float [long EXPONENTS]    all float32 inputs at that many exponents, a minute for each; without it one input in
//                                   1021 at 32 exponents. 16-bit types: always all inputs, in a long run at every exponent
//                                   of the type up to 2¹⁵, else at a few hundred.
//
// Prints a table in Markdown (`make every-float` writes it to results/every_float.md), and also checks:
// - ψ(−h) has the bits of −ψ(h), and all instruction sets give the same bits: in a long run one block
//   of 4096 inputs in 16, because the baseline takes a hundred times as long as AVX-512;
// - signs, zeros, infinities and NaN; no finite input gives NaN;
// - the errors stay below their bounds.
#include <cstdlib>
#include <memory>
#include <string>

#include "../buffers.h"
#include "../check.h"
#include "reference.h"

namespace nnorm_test {
namespace {

using nnorm::Arithmetic;
using nnorm::BFloat16;
using nnorm::Float16;
using nnorm::InstructionSet;

constexpr size_t block = 4096;

// A type's places after the point, least and greatest exponents to base 2, and its positive numbers by their bits.
template <class T>
struct TypeOf;
template <>
struct TypeOf<float> {
  static constexpr int digits = 23, least = -126, greatest = 127;
  static constexpr uint32_t infinity = 0x7f800000;
};
template <>
struct TypeOf<Float16> {
  static constexpr int digits = 10, least = -14, greatest = 15;
  static constexpr uint32_t infinity = 0x7c00;
};
template <>
struct TypeOf<BFloat16> {
  static constexpr int digits = 7, least = -126, greatest = 127;
  static constexpr uint32_t infinity = 0x7f80;
};

template <class T>
T of_bits(uint32_t bits) {
  T value;
  if constexpr (sizeof(T) == 4)
    std::memcpy(&value, &bits, 4);
  else
    value.bits = uint16_t(bits);
  return value;
}

double power_of_two(int exponent) { return nnorm::from_bits(int64_t(exponent + 1023) << 52); }

// The errors of one line of the table, for all of its exponents.
struct Errors {
  Worst in_range[3];  // |h| up to 10, 10⁴ and 2¹²⁶
  size_t compared = 0, right = 0, falls = 0, saturated = 0, tiny = 0;
  double tiny_steps = 0;
};
constexpr const char* range_names[] = {"|h| ≤ 10", "≤ 10⁴", "greater"};

// y = ψ of a block for the prepared exponent `e` of `table`.
template <class T>
void compute(const InstructionSet& set, const T* h, size_t n, const std::vector<float>& table, size_t exponents,
             size_t e, T* y) {
  nnorm::ChannelWork<T> work{};
  work.x = h;
  work.y = y;
  work.table = table.data() + e;
  work.table_width = exponents;
  work.size = work.row_length = n;
  work.period = 1;
  work.sharing = nnorm::Sharing::row;
  set.table<T>().batch_normal_norm(work, 0, nnorm::count_items(work));
}

std::vector<float> prepared(const InstructionSet& set, const std::vector<float>& eta) {
  const std::vector<float> ones(eta.size(), 1), zeros(eta.size(), 0);
  const float* parameters[] = {ones.data(), zeros.data(), eta.data(), eta.data(), ones.data(), zeros.data()};
  std::vector<float> table(size_t(nnorm::ChannelField::count) * eta.size());
  set.float32.prepare_channels(parameters, eta.size(), 1, table.data());
  return table;
}

template <class T>
class EveryInput {
  using Facts = TypeOf<T>;

 public:
  EveryInput(const std::vector<float>& eta, size_t one_in, size_t compared_one_in)
      : eta_(eta), one_in_(one_in), compared_one_in_(compared_one_in) {
    for (const InstructionSet* const* next = nnorm::instruction_sets(); *next; ++next) sets_.push_back(*next);
  }

  void run() {
    for (const InstructionSet* set : sets_) tables_.push_back(prepared(*set, eta_));
    for (size_t first = 0, i = 0; first < Facts::infinity; first += block * one_in_, ++i) {
      const size_t n = std::min(block, (Facts::infinity - first + one_in_ - 1) / one_in_);
      for (size_t k = 0; k < n; ++k) {
        h_[k] = of_bits<T>(uint32_t(first + k * one_in_));
        wide_[k] = nnorm::widened(h_[k]);
      }
      logarithms_of(wide_, n, log_);
      for (size_t e = 0; e < eta_.size(); ++e) compare(n, e, (i + e) % compared_one_in_ == 0);
    }
    not_numbers();
  }

  void print(const char* type) const {
    std::string names;
    for (const InstructionSet* set : sets_) names += std::string(names.empty() ? "" : ", ") + set->name;
    row(type, names.c_str());
  }
  const Errors& errors() const { return errors_; }
  size_t different() const { return different_; }
  size_t mirrored_wrong() const { return mirrored_wrong_; }
  size_t wrong_sign_or_nan() const { return wrong_; }

 private:
  static constexpr uint32_t sign = sizeof(T) == 4 ? 0x80000000 : 0x8000;

  static uint32_t bits(T value) {
    uint32_t result = 0;
    std::memcpy(&result, &value, sizeof value);
    return result;
  }

  void compare(size_t n, size_t e, bool compares_all) {
    psi_of_logarithms(log_, n, double(eta_[e]), reference_);
    compute(*sets_[0], h_, n, tables_[0], eta_.size(), e, y_);
    measure(n, e);
    if (compares_all) compare_all(n, e);
  }

  // Compares y_ of the first instruction set with those of the others, and with its results for −h.
  void compare_all(size_t n, size_t e) {
    for (size_t k = 0; k < n; ++k) other_[k] = of_bits<T>(bits(h_[k]) | sign);
    compute(*sets_[0], other_, n, tables_[0], eta_.size(), e, z_);
    size_t mirrored = 0;
    for (size_t k = 0; k < n; ++k) mirrored += bits(z_[k]) != (bits(y_[k]) | sign) && (bits(y_[k]) | (bits(z_[k]) & ~sign)) != 0;
    mirrored_wrong_ += mirrored;
    for (size_t w = 1; w < sets_.size(); ++w) {
      compute(*sets_[w], h_, n, tables_[w], eta_.size(), e, z_);
      different_ += std::memcmp(y_, z_, n * sizeof(T)) != 0;
    }
  }

  // Adds the errors of y_ against reference_.
  void measure(size_t n, size_t e) {
    const double eta = double(eta_[e]), usable = std::fmax(std::fabs(eta), double(nnorm::Format<float>::least_exponent));
    // If 2^z saturates, ψ stays finite. If |h|·η is denormal, the error is absolute.
    const double last_log = eta > 0 ? 127.5 * 0.6931471805599453 / eta : INFINITY;
    const double least = double(std::numeric_limits<float>::min()) * nnorm::output_divisor<double> / usable;
    size_t compared = 0, right = 0, falls = 0, wrong = 0;
    const double before = previous_[e];
    for (size_t k = 0; k < n; ++k) {
      constexpr double beyond = 0x1p1000;
      const double of_kernel = double(nnorm::widened(y_[k])), reference = reference_[k];
      // Infinity counts as the next number.
      const double y = of_kernel > beyond ? 2 * power_of_two(Facts::greatest) : of_kernel;
      const int64_t of_reference = nnorm::bits_of(reference) >> 52;
      const int64_t exponent = of_reference - 1023 < Facts::least ? Facts::least : of_reference - 1023;
      const double last_place = nnorm::from_bits(int64_t(exponent - Facts::digits + 1023) << 52);
      const double to_places = nnorm::from_bits(int64_t(1023 - exponent + Facts::digits) << 52);
      const bool counts = double(wide_[k]) <= 0x1p126 && double(wide_[k]) >= least && log_[k] < last_log;
      constexpr double integer = 0x1.8p52;
      const double rounded = ((reference * to_places + integer) - integer) * last_place;
      const bool overflows = rounded >= 2 * power_of_two(Facts::greatest);
      const bool is_right = y == (overflows ? 2 * power_of_two(Facts::greatest) : rounded);
      error_[k] = counts && !overflows ? std::fabs(y - reference) * to_places : 0;
      compared += counts;
      right += counts && is_right;
      falls += log_[k] < last_log && of_kernel < (k ? double(nnorm::widened(y_[k - 1])) : before);
      wrong += !(of_kernel >= 0);  // NaN too
    }
    previous_[e] = double(nnorm::widened(y_[n - 1]));
    errors_.compared += compared;
    errors_.right += right;
    errors_.falls += falls;
    wrong_ += wrong;
    double greatest = 0;
    for (size_t k = 0; k < n; ++k) greatest = error_[k] > greatest ? error_[k] : greatest;
    const auto range_of = [](float h) { return h <= 10 ? 0 : h <= 1e4f ? 1 : 2; };
    bool is_worse = false;
    for (int range = range_of(wide_[0]); range <= range_of(wide_[n - 1]); ++range)
      is_worse = is_worse || greatest > errors_.in_range[range].error;
    if (is_worse)
      for (size_t k = 0; k < n; ++k) errors_.in_range[range_of(wide_[k])].see(error_[k], double(wide_[k]), eta);
    if (compared == n) return;
    for (size_t k = 0; k < n; ++k) {
      errors_.saturated += double(wide_[k]) > 0x1p126 || log_[k] >= last_log;
      if (double(wide_[k]) >= least) continue;
      ++errors_.tiny;
      const double step = power_of_two(Facts::least - Facts::digits);
      const double in_steps = std::fabs(double(nnorm::widened(y_[k])) - reference_[k]) /
                              (double(std::numeric_limits<float>::denorm_min()) * (1 + nnorm::output_divisor<double> / usable) + step / 2);
      errors_.tiny_steps = in_steps > errors_.tiny_steps ? in_steps : errors_.tiny_steps;
    }
  }

  // On all instruction sets, infinities give the result of the greatest magnitude, NaN gives NaN.
  void not_numbers() {
    const T special[] = {of_bits<T>(Facts::infinity), of_bits<T>(Facts::infinity | sign), of_bits<T>(Facts::infinity + 1),
                         of_bits<T>(0), of_bits<T>(sign), of_bits<T>(Facts::infinity - 1)};
    for (size_t w = 0; w < tables_.size(); ++w)
      for (size_t e = 0; e < eta_.size(); ++e) {
        T y[6];
        compute(*sets_[w], special, 6, tables_[w], eta_.size(), e, y);
        const float nan = nnorm::widened(y[2]);
        const bool beyond = sizeof(T) == 4 || Facts::greatest == 127;  // the greatest number is above 2¹²⁶, as infinity is
        wrong_ += nan == nan || bits(y[3]) != 0 || bits(y[4]) != 0 || bits(y[1]) != (bits(y[0]) | sign) ||
                  (beyond && bits(y[5]) != bits(y[0]));
      }
  }

  void row(const char* type, const char* sets) const {
    const Errors& e = errors_;
    std::printf("| %s | %s | %zu |", type, sets, eta_.size());
    for (const Worst& worst : e.in_range) {
      if (worst.error > 0)
        std::printf(" %.2f (h = %.9g, η = %.9g) |", worst.error, worst.first, worst.second);
      else
        std::printf(" – |");
    }
    std::printf(" %.4f %% | %zu of %zu | %zu | %zu | %zu, %.2f |\n", 100 * double(e.right) / double(e.compared),
                e.compared - e.right, e.compared, e.falls, e.saturated, e.tiny, e.tiny_steps);
    std::fflush(stdout);
  }

  const std::vector<float> eta_;
  const size_t one_in_, compared_one_in_;
  std::vector<const InstructionSet*> sets_;
  std::vector<std::vector<float>> tables_;
  T h_[block], y_[block], z_[block], other_[block];
  float wide_[block];
  double log_[block], reference_[block], error_[block];
  std::vector<double> previous_ = std::vector<double>(eta_.size(), -1);
  Errors errors_;
  size_t different_ = 0, mirrored_wrong_ = 0, wrong_ = 0;
};

// 0, 1, 2 and special cases of a formula, then random exponents.
std::vector<float> usual_exponents(size_t count) {
  std::vector<float> result{0, 1, 2, -1, 0.5f, 1.5f, 1e-3f, 4, -2, 3, 0x1p-26f, -0.5f, -1e-3f, 0x1p-10f, 1e-6f, -0x1p-26f, 1.0000001f, 1.9999999f};
  Random random(3);
  while (result.size() < count) result.push_back(float(random.uniform(-2, 4)));
  result.resize(count);
  return result;
}

// Exponents for which the kernels have no bound of the error.
std::vector<float> other_exponents() { return {5, 8, -4, -16, 100, -100, 0x1p15f, -0x1p15f, 0x1p-27f, -0x1p-27f, 0x1p-149f}; }

template <class T>
std::vector<float> exponents_of_type(bool all) {
  std::vector<float> result;
  for (uint32_t bits = 0; bits < TypeOf<T>::infinity; bits += all ? 1 : TypeOf<T>::infinity / 128)
    for (const float sign : {1.0f, -1.0f}) {
      const float eta = sign * nnorm::widened(of_bits<T>(bits));
      if (std::fabs(eta) <= nnorm::Format<float>::greatest_exponent) result.push_back(eta);
    }
  return result;
}

template <class T>
void test(const char* type, const std::vector<float>& eta, size_t one_in, size_t compared_one_in, double bound, double least_right) {
  const auto made = std::make_unique<EveryInput<T>>(eta, one_in, compared_one_in);  // too large for the stack
  EveryInput<T>& every = *made;
  every.run();
  every.print(type);
  const double right = double(every.errors().right) / double(every.errors().compared);
  for (int r = 0; r < 2; ++r) {
    const Worst& worst = every.errors().in_range[r];
    CHECK(worst.error <= bound, "%s: %g ULP at (%.9g, %.9g)", type, worst.error, worst.first, worst.second);
  }
  CHECK(every.different() == 0, "%s: %zu blocks differ between instruction sets", type, every.different());
  CHECK(every.mirrored_wrong() == 0, "%s: %zu of ψ(−h) are not −ψ(h)", type, every.mirrored_wrong());
  CHECK(every.wrong_sign_or_nan() == 0, "%s: %zu have the wrong sign, zero or NaN", type, every.wrong_sign_or_nan());
  CHECK(right >= least_right, "%s: %.4f %% rounded correctly", type, 100 * right);
  CHECK(every.errors().tiny_steps <= 2, "%s: %g steps for tiny h", type, every.errors().tiny_steps);
}

}  // namespace
}  // namespace nnorm_test

int main(int count, char** arguments) {
  using namespace nnorm_test;
  const bool is_long = count == 3 && std::string(arguments[1]) == "long";
  if (count != 1 && !is_long) return std::printf("usage: every_float [long EXPONENTS]\n"), 2;
  const size_t compared = is_long ? 16 : 1;
  std::printf("| type | computed by | exponents |");
  for (const char* range : range_names) std::printf(" greatest error, ULP, %s |", range);
  std::printf(" rounded correctly | not correctly | falls | saturated | tiny |\n");
  std::printf("| --- | --- | ---: | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |\n");
  test<Float16>("float16", exponents_of_type<Float16>(is_long), 1, compared, 0.51, 0.999);
  test<BFloat16>("bfloat16", exponents_of_type<BFloat16>(is_long), 1, compared, 0.51, 0.999);
  test<float>("float32, η beyond [−2, 4] or replaced by 2⁻²⁶, a sample", other_exponents(), 1021, 1, INFINITY, 0);
  if (is_long) {
    for (const float eta : usual_exponents(size_t(std::strtoull(arguments[2], nullptr, 10)))) {
      char type[64];
      std::snprintf(type, sizeof type, "float32, η = %.9g", double(eta));
      test<float>(type, {eta}, 1, compared, 5, 0.3);
    }
  } else {
    test<float>("float32, a sample", usual_exponents(32), 1021, compared, 5, 0.3);
  }
  return finish();
}
