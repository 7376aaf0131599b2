// Compares the CPU kernel of LayerNormalNorm and GroupNormalNorm with a loop over the formulas: every type, rows around
// the sizes of tiles and buffers, weights shared in every way, degenerate rows, and items in any order.
#include <string>

#include "buffers.h"
#include "check.h"
#include "mathematics_table.h"
#include "rows.h"

namespace nnorm_test {
namespace {

template <class T>
std::vector<T> run(const AvailableInstructionSet& set, const Rows<T>& problem, bool in_place, size_t offset, Order order,
                   Random& random) {
  const Input<T> apart(problem.x, offset);
  Output<T> y = in_place ? Output<T>(problem.x, offset) : Output<T>(problem.x.size(), offset);
  run_items(set.kernels->template table<T>().layer_group_normal_norm,
            problem.work(in_place ? y.data() : apart.data(), y.data()),
            order, random);
  CHECK(y.guards_hold(), "%s %s, %zux%zu: written outside y", set.name, NameOf<T>::value, problem.geometry.rows,
        problem.geometry.row_length);
  return y.values();
}

std::vector<RowGeometry> geometries() {
  std::vector<RowGeometry> all{{0, 5, 1, 1}, {3, 0, 1, 1}, {1, 70000, 1, 1}, {1, 1 << 20, 1, 1 << 18}, {2, 70000, 2, 7}};
  for (const size_t length : {1, 2, 15, 16, 17, 255, 256, 257, 768, 4095, 4096, 4097}) {
    all.push_back({1, length, 1, 1});
    all.push_back({length < 300 ? 5 + 9000 / length : 5, length, 3, 1});  // several items
    all.push_back({3, length, 2, length});                                // one weight for the row
    for (const size_t run : {3, 5, 16, 64, 257})
      if (length % run == 0 && length != run) all.push_back({4, length, 2, run});
  }
  return all;
}

template <class T>
void test_type(const std::vector<AvailableInstructionSet>& sets, ErrorTable& errors, double bound) {
  Random random(1);
  std::vector<Worst> worst(sets.size());
  for (const RowGeometry& geometry : geometries()) {
    const Rows<T> problem(geometry, normal_numbers(geometry.rows * geometry.row_length, random), random);
    std::vector<Wider<T>> reference, size;
    for (size_t row = 0; row < (geometry.row_length ? geometry.rows : 0); ++row) {
      const ReferenceRow<Wider<T>> of_row = reference_row(problem, row);
      reference.insert(reference.end(), of_row.y.begin(), of_row.y.end());
      size.insert(size.end(), of_row.size.begin(), of_row.size.end());
    }
    for (size_t k = 0; k < sets.size(); ++k) {
      const AvailableInstructionSet& set = sets[k];
      const std::vector<T> y = run(set, problem, false, 0, Order::at_once, random);
      CHECK(same_bits(y, run(set, problem, false, 1, Order::shuffled, random)),
            "%s %s, %zux%zu: one by one, unaligned", set.name, NameOf<T>::value, geometry.rows, geometry.row_length);
      // In place, an item that ran twice would transform x twice.
      CHECK(same_bits(y, run(set, problem, true, 3, Order::in_groups, random)),
            "%s %s, %zux%zu: in place, in groups", set.name, NameOf<T>::value, geometry.rows, geometry.row_length);
      for (size_t i = 0; i < y.size(); ++i) {
        const double error = double(std::fabs(nnorm::widened(y[i]) - reference[i])) - last_rounding<T>(double(reference[i]));
        worst[k].see(error / double(size[i]), double(geometry.row_length), double(i));
      }
    }
  }
  for (size_t k = 0; k < sets.size(); ++k)
    errors.add(std::string("layer_group_normal_norm, ") + NameOf<T>::value, bound, sets[k].name, worst[k]);
}

// λ̂ itself, which is not an output.
template <class T>
void test_lmbda(const std::vector<AvailableInstructionSet>& sets, ErrorTable& errors, double bound) {
  struct Distribution {
    const char* name;
    double (*draw)(Random&);
  };
  const bool wide = sizeof(T) > 2;  // a 16-bit type cannot represent a mean of 10000 and the deviations
  const Distribution distributions[] = {
      {"normal", [](Random& random) { return random.normal(); }},
      {"uniform", [](Random& random) { return random.uniform(-3, 5); }},
      {"exponential", [](Random& random) { return -std::log(random.uniform()); }},
      {"bimodal", [](Random& random) { return (random.below(3) ? 1 : -1) + 0.2 * random.normal(); }},
      {"mean of 100 deviations", [](Random& random) { return 100 + random.normal(); }},
      {"mean of 10000 deviations", [](Random& random) { return 10000 + random.normal(); }},
  };
  for (const Distribution& distribution : distributions)
    for (const AvailableInstructionSet& set : sets) {
      if (!wide && std::strstr(distribution.name, "10000")) continue;
      Random random(2);
      Worst worst;
      for (const size_t length : {256, 300, 768, 1024, 4096, 5000, 50000})
        for (int repeat = 0; repeat < (length < 4096 ? 6 : 1); ++repeat) {
          std::vector<double> numbers(length);
          for (double& value : numbers) value = distribution.draw(random);
          const Rows<T> problem({1, length, 1, length}, numbers, random);
          std::vector<T> y(length);
          const double lmbda = set.mathematics->of(T()).lmbda_of_row(problem.work(problem.x.data(), y.data()), 0);
          worst.see(double(std::fabs(lmbda - reference_row(problem, 0).lmbda.lmbda)), double(length), lmbda);
        }
      errors.add("lambda, " + std::string(distribution.name) + ", " + NameOf<T>::value, bound, set.name, worst);
    }
}

// Rows of equal elements become the bias. The mean, summed in T, may differ from the element in the last places; for a large
// element that difference is much more than √ε.
template <class T>
void test_constant_rows(const AvailableInstructionSet& set) {
  Random random(3);
  for (const double value : {0.0, 1.0, -0.1, 3e-39, 1234.1, -1234567.1, 7.7e8})
    for (const size_t length : {1, 2, 17, 256, 257, 768, 5000})
      for (const double delta : {0.0, reference_delta}) {
        T in_type;
        nnorm::narrow(Arithmetic<T>(value), in_type);
        if (!std::isfinite(nnorm::widened(in_type))) continue;
        Rows<T> problem({2, length, 1, length}, std::vector<double>(2 * length, value), random);
        problem.delta = delta;
        const double rest =
            2 * std::fabs(value) * double(std::numeric_limits<Arithmetic<T>>::epsilon()) / std::sqrt(problem.epsilon);
        for (const T y : run(set, problem, false, 0, Order::at_once, random)) {
          const double error = std::fabs(double(nnorm::widened(y)) - double(problem.bias[0]));
          CHECK(error <= last_rounding<T>(problem.bias[0]) + 1e-5 * rest, "%s %s: %zu times %g, delta %g: off by %g",
                set.name, NameOf<T>::value, length, value, delta, error);
        }
      }
}

// Rows with NaN or infinity become NaN, with ε = 0 also rows of equal elements. Their neighbors are unaffected.
template <class T>
void test_bad_rows(const AvailableInstructionSet& set) {
  Random random(4);
  for (const size_t length : {3, 64, 257, 5000}) {
    Rows<T> clean({6, length, 1, 1}, normal_numbers(6 * length, random), random);
    clean.epsilon = 0;
    Rows<T> corrupted = clean;
    nnorm::narrow(Arithmetic<T>(NAN), corrupted.x[length + length / 2]);
    nnorm::narrow(Arithmetic<T>(-INFINITY), corrupted.x[4 * length - 1]);
    for (size_t i = 0; i < length; ++i) nnorm::narrow(Arithmetic<T>(1), corrupted.x[4 * length + i]);
    const std::vector<T> expected = run(set, clean, false, 0, Order::at_once, random);
    const std::vector<T> y = run(set, corrupted, false, 0, Order::at_once, random);
    for (size_t i = 0; i < y.size(); ++i) {
      const size_t row = i / length;
      const bool bad = row == 1 || row == 3 || row == 4, is_nan = std::isnan(nnorm::widened(y[i]));
      CHECK(bad ? is_nan : !is_nan && std::memcmp(&y[i], &expected[i], sizeof(T)) == 0,
            "%s %s: row %zu of length %zu is %g", set.name, NameOf<T>::value, row, length,
            double(nnorm::widened(y[i])));
    }
  }
}

// Rows with a few extreme outliers, and rows whose deviation is below √ε. For values of variance 1, L″ is at least
// 0.188 (found by search), so λ̂ has no pole. If ε is greater than the variance, L″ goes to 0 as h⁴, and only δ
// remains.
template <class T>
void test_hard_rows(const std::vector<AvailableInstructionSet>& sets, ErrorTable& errors, double bound) {
  Random random(5);
  const double epsilon = double(std::numeric_limits<Arithmetic<T>>::epsilon());
  std::vector<Worst> worst(sets.size());
  double nearest = INFINITY, steepest = 0;
  int hopeless = 0, rows = 0;
  for (int i = 0; i < 4000; ++i) {
    const size_t length = 16 + random.below(400);
    std::vector<double> numbers(length);
    const double tail = random.uniform(0.3, 3), outlier = random.log_uniform(1, 300),
                 spread = random.log_uniform(1e-7, 1e-2);
    for (double& value : numbers) {
      value = random.normal();
      if (i % 3 == 0) value *= std::pow(random.uniform(), -1 / tail);
      if (i % 3 == 1) value *= spread;
    }
    if (i % 3 == 2) numbers[0] = outlier;
    Rows<T> problem({1, length, 1, length}, numbers, random);
    if (i % 2) problem.delta = 0;
    const ReferenceRow<Wider<T>> reference = reference_row(problem, 0);
    nearest = std::min(nearest, std::fabs(double(reference.lmbda.damped)));
    steepest = std::max(steepest, std::fabs(double(reference.lmbda.lmbda)));
    const bool lost = epsilon * double(reference.lmbda.condition) > 0.01;
    hopeless += lost;
    ++rows;
    for (size_t k = 0; k < sets.size(); ++k) {
      std::vector<T> y(length);
      const double lmbda = sets[k].mathematics->of(T()).lmbda_of_row(problem.work(problem.x.data(), y.data()), 0);
      if (!lost) worst[k].see(double(std::fabs(lmbda - reference.lmbda.lmbda) / reference.lmbda.condition), double(i), lmbda);
      for (size_t j = 0; j < length; ++j) {
        const bool representable = std::fabs(reference.y[j]) < std::numeric_limits<Arithmetic<T>>::max() / 4;
        CHECK(!std::isnan(y[j]) && (lost || !representable || std::isfinite(y[j])),
              "%s %s: lambda %g, true %g: y = %g, true %g", sets[k].name, NameOf<T>::value, lmbda,
              double(reference.lmbda.lmbda), double(y[j]), double(reference.y[j]));
      }
    }
  }
  std::printf("hard rows, %s: %d rows, |L'' + delta| from %.3g, |lambda| up to %.4g; %d without a digit of lambda\n",
              NameOf<T>::value, rows, nearest, steepest, hopeless);
  for (size_t k = 0; k < sets.size(); ++k)
    errors.add(std::string("lambda over its condition, hard, ") + NameOf<T>::value, bound, sets[k].name, worst[k]);
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  const std::vector<AvailableInstructionSet> sets = available_instruction_sets();
  ErrorTable errors(0);  // the roundings of a long sum never have their greatest errors together
  test_type<float>(sets, errors, 1e-6);
  test_type<nnorm::Float16>(sets, errors, 1e-6);
  test_type<nnorm::BFloat16>(sets, errors, 1e-6);
  test_lmbda<float>(sets, errors, 1e-6);
  test_lmbda<nnorm::Float16>(sets, errors, 1e-6);
  test_lmbda<nnorm::BFloat16>(sets, errors, 1e-6);
  test_hard_rows<float>(sets, errors, 3e-6);
  if (have_reference_for_double) {
    test_type<double>(sets, errors, 3e-15);
    test_lmbda<double>(sets, errors, 1e-14);
    test_hard_rows<double>(sets, errors, 2e-15);
  }
  for (const AvailableInstructionSet& set : sets) {
    test_constant_rows<float>(set);
    test_constant_rows<double>(set);
    test_constant_rows<nnorm::Float16>(set);
    test_constant_rows<nnorm::BFloat16>(set);
    test_bad_rows<float>(set);
    test_bad_rows<double>(set);
    test_bad_rows<nnorm::Float16>(set);
    test_bad_rows<nnorm::BFloat16>(set);
  }
  errors.print_and_check();
  return finish();
}
