// Compares the CPU kernel of BatchNormalNorm with a loop over the formula: every type, epilogue and way to share
// parameters, unusual sizes and addresses, results in place, and items in any order.
#include <string>

#include "channels.h"
#include "check.h"
#include "mathematics_table.h"

namespace nnorm_test {
namespace {

using nnorm::ChannelWork;
using nnorm::Sharing;

struct Geometry {
  Sharing sharing;
  size_t row_length, rows, period, lanes, repeat;

  size_t size() const { return row_length * rows; }
  size_t channels() const {
    return sharing == Sharing::row ? period : sharing == Sharing::lane ? period * lanes : row_length / repeat;
  }
  size_t channel_of(size_t i) const {
    const size_t row = i / row_length, position = i % row_length;
    return sharing == Sharing::row    ? row % period
           : sharing == Sharing::lane ? row % period * lanes + position % lanes
                                      : position / repeat;
  }
  std::string name() const {
    const char* names[] = {"row", "element", "lane"};
    return std::string(names[int(sharing)]) + " " + std::to_string(rows) + "x" + std::to_string(row_length) +
           " period " + std::to_string(period) + " lanes " + std::to_string(lanes) + " repeat " +
           std::to_string(repeat);
  }
};

// Sizes just below, at and above those of tiles (256) and items (4096).
std::vector<Geometry> geometries() {
  std::vector<Geometry> all{
      {Sharing::row, 5, 0, 1, 0, 1}, {Sharing::element, 5, 0, 1, 0, 1}, {Sharing::lane, 16, 0, 1, 16, 1}};
  for (const size_t length : {1, 3, 255, 256, 257, 4095, 4096, 4097, 5001})
    for (const size_t rows : {1, 7}) all.push_back({Sharing::row, length, rows, rows == 1 ? 1u : 3u, 0, 1});
  all.push_back({Sharing::row, 1, 8195, 5, 0, 1});
  for (const size_t lanes : {8, 16})
    for (const size_t extent : {1, 3, 16, 17, 255, 256, 257, 513})
      for (const size_t rows : {1, 5})
        all.push_back({Sharing::lane, extent * lanes, rows, rows == 1 ? 1u : 2u, lanes, 1});
  for (const auto& [channels, repeat] :
       {std::pair<size_t, size_t>{1, 1}, {7, 1}, {5, 3}, {255, 1}, {257, 1}, {64, 9}, {4095, 1}, {4097, 1}})
    for (const size_t rows : {1, 6}) all.push_back({Sharing::element, channels * repeat, rows, 1, 0, repeat});
  return all;
}

enum class Place { apart, over_x, over_residual };

template <class T>
std::vector<T> run(const AvailableInstructionSet& set, const Geometry& geometry, const EpilogueFacts& facts,
                   const ChannelParameters<Arithmetic<T>>& p, const std::vector<T>& x, const std::vector<T>& residual,
                   Place place, size_t offset, Order order, Random& random) {
  const nnorm::KernelTable<T>& kernels = set.kernels->template table<T>();
  const size_t width = geometry.channels() * geometry.repeat;
  std::vector<Arithmetic<T>> table(size_t(nnorm::ChannelField::count) * width);
  kernels.prepare_channels(p.pointers().data(), geometry.channels(), geometry.repeat, table.data());
  const Input<T> x_apart(x, offset), residual_apart(residual, offset);
  Output<T> y = place == Place::over_x          ? Output<T>(x, offset)
                : place == Place::over_residual ? Output<T>(residual, offset)
                                                : Output<T>(x.size(), offset);
  ChannelWork<T> work{};
  work.x = place == Place::over_x ? y.data() : x_apart.data();
  if (facts.takes_residual) work.residual = place == Place::over_residual ? y.data() : residual_apart.data();
  work.y = y.data();
  work.table = table.data();
  work.table_width = width;
  work.size = geometry.size();
  work.row_length = geometry.row_length;
  work.period = geometry.period;
  work.lanes = geometry.lanes;
  work.sharing = geometry.sharing;
  work.epilogue = facts.epilogue;
  run_items(kernels.batch_normal_norm, work, order, random);
  CHECK(y.guards_hold(), "%s %s, %s: written outside y", set.name, NameOf<T>::value, geometry.name().c_str());
  return y.values();
}

template <class T>
void test_type(const std::vector<AvailableInstructionSet>& sets, ErrorTable& errors, double bound) {
  using Real = Arithmetic<T>;
  Random random(1);
  std::vector<Worst> worst(sets.size());
  for (const Geometry& geometry : geometries())
    for (const EpilogueFacts& facts : nnorm::epilogues) {
      const size_t n = geometry.size();
      std::vector<double> numbers(n), others(n);
      for (double& value : numbers) value = random.below(50) ? 2 * random.normal() : 0;
      for (double& value : others) value = random.normal();
      if (n > 4) numbers[random.below(n)] = NAN;  // the result must be NaN only there
      const std::vector<T> x = to_type<T>(numbers), residual = to_type<T>(others);
      const ChannelParameters<Real> p(geometry.channels(), random);
      std::vector<Wider<T>> reference, size;
      expected([&](size_t i) { return geometry.channel_of(i); }, facts, p, widened_all(x), widened_all(residual),
               reference, size);

      for (size_t k = 0; k < sets.size(); ++k) {
        const AvailableInstructionSet& set = sets[k];
        const auto again = [&](Place place, size_t offset, Order order) {
          return run<T>(set, geometry, facts, p, x, residual, place, offset, order, random);
        };
        const std::string name =
            std::string(set.name) + " " + NameOf<T>::value + ", " + facts.operator_name + ", " + geometry.name();
        const std::vector<T> y = again(Place::apart, 0, Order::at_once);
        CHECK(same_bits(y, again(Place::apart, 1, Order::shuffled)), "%s: one by one, unaligned", name.c_str());
        // In place, an item that ran twice would transform x twice.
        CHECK(same_bits(y, again(Place::over_x, 1, Order::in_groups)), "%s: in place, in groups", name.c_str());
        if (facts.takes_residual)
          CHECK(same_bits(y, again(Place::over_residual, 3, Order::shuffled)), "%s: over the residual", name.c_str());

        // The result of a narrow type is that of the float kernel, rounded once; the error is measured before rounding.
        const std::vector<Real> exact = run<Real>(set, geometry, facts, p, widened_all(x), widened_all(residual),
                                                  Place::apart, 0, Order::at_once, random);
        for (size_t i = 0; i < n; ++i) {
          T rounded;
          nnorm::narrow(exact[i], rounded);
          CHECK(std::memcmp(&rounded, &y[i], sizeof(T)) == 0 ||
                    (std::isnan(exact[i]) && std::isnan(nnorm::widened(y[i]))),
                "%s: y[%zu] = %.9g is not %.9g rounded", name.c_str(), i, double(nnorm::widened(y[i])),
                double(exact[i]));
          if (std::isnan(reference[i]))
            CHECK(std::isnan(exact[i]), "%s: NaN becomes %g", name.c_str(), double(exact[i]));
          else
            worst[k].see(double(std::fabs(exact[i] - reference[i]) / size[i]), double(nnorm::widened(x[i])),
                         double(exact[i]));
        }
      }
    }
  for (size_t k = 0; k < sets.size(); ++k)
    errors.add(std::string("batch_normal_norm, ") + NameOf<T>::value, bound, sets[k].name, worst[k]);
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  const std::vector<AvailableInstructionSet> sets = available_instruction_sets();
  ErrorTable errors(0.4);  // several roundings seldom have their greatest errors together
  test_type<float>(sets, errors, 3e-7);
  test_type<nnorm::Float16>(sets, errors, 3e-7);
  test_type<nnorm::BFloat16>(sets, errors, 3e-7);
  if (have_reference_for_double) test_type<double>(sets, errors, 5e-16);
  errors.print_and_check();
  return finish();
}
