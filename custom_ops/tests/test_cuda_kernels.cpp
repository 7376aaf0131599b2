// Compares the CUDA kernels with loops over the formulas: every type, epilogue, kernel and access width, unusual sizes
// and addresses, results in place. CMake builds this twice: for the CPU (cuda_on_host.h), and with CUDA.
//
//   test_cuda_kernels [LENGTH [N]]    of the longest row (default 2^20); each N-th size, for tools that slow it down
#include <cstdlib>
#include <memory>
#include <string>

#include "channels.h"
#include "check.h"
#include "cuda_rows.h"

namespace nnorm_test {
namespace {

using nnorm::ChannelProblem;

struct ChannelGeometry {
  size_t samples, channels, extent, lanes;  // lanes: 0, or the number of lanes if channels are last

  size_t size() const { return samples * (lanes ? lanes : channels) * extent; }
  size_t channel_of(size_t i) const { return lanes ? i % lanes : i / extent % channels; }
  bool padding(size_t i) const { return channel_of(i) >= channels; }
  std::string name() const {
    return std::to_string(samples) + "x" + std::to_string(channels) + "x" + std::to_string(extent) +
           (lanes ? " in " + std::to_string(lanes) + " lanes" : "");
  }
};

// Extents around one access (2, 4, 8 elements), those of a warp (32 accesses) and of its segment (128); few and many samples.
std::vector<ChannelGeometry> channel_geometries() {
  // The last of these: several blocks of columns whose first and last channels are shared with their neighbors.
  std::vector<ChannelGeometry> all{{0, 3, 4, 0}, {2, 3, 0, 0}, {1, 1, 1, 0}, {1, 1, 4099, 0}, {1, 2, 70001, 0}, {17, 60, 49, 0}};
  all.push_back({256, 3, 1, 0});  // a block that begins with the last channel, and has as many rows as it can
  // Without a GPU these run at once, with accesses of four elements that cross rows.
  for (const ChannelGeometry& g : {ChannelGeometry{4, 21, 49, 0}, {2, 30, 34, 0}, {1, 3, 1028, 0}}) all.push_back(g);
  for (const size_t extent : {1, 2, 3, 16, 49, 64, 129, 256, 511, 1024, 1025, 3001})
    for (const size_t samples : {1, 3, 17}) all.push_back({samples, 5, extent, 0});
  for (const size_t channels : {1, 7, 256, 1025, 2048})
    for (const size_t samples : {1, 70}) all.push_back({samples, channels, 1, 0});
  for (const auto& [channels, lanes] : {std::pair<size_t, size_t>{1, 8}, {3, 8}, {8, 8}, {5, 5}, {13, 16}, {1000, 1000}})
    for (const size_t samples : {1, 67}) all.push_back({samples, channels, 1, lanes});
  return all;
}

template <class T>
std::vector<T> run(const ChannelGeometry& g, const EpilogueFacts& facts, const ChannelParameters<Arithmetic<T>>& p,
                   const std::vector<T>& x, const std::vector<T>& residual, Place place, Halves halves) {
  Input<T> x_apart(x, place.x), residual_apart(residual, place.other);
  Output<T> y = place.result == Place::over_x          ? Output<T>(x, place.y)
                : place.result == Place::over_residual ? Output<T>(residual, place.y)
                                                       : Output<T>(x.size(), place.y);
  const OnDevice<T> x_there(x_apart), residual_there(residual_apart), y_there(y);
  ChannelProblem<T> problem{};
  problem.x = place.result == Place::over_x ? y_there.data() : x_there.data();
  if (facts.takes_residual)
    problem.residual = place.result == Place::over_residual ? y_there.data() : residual_there.data();
  problem.y = y_there.data();
  std::vector<Input<Arithmetic<T>>> parameters;
  for (const auto* numbers : {&p.scale, &p.shift, &p.pos, &p.neg, &p.weight, &p.bias}) parameters.emplace_back(*numbers, 0);
  std::vector<std::unique_ptr<OnDevice<Arithmetic<T>>>> there;
  for (size_t i = 0; i < parameters.size(); ++i) {
    there.push_back(std::make_unique<OnDevice<Arithmetic<T>>>(parameters[i]));
    problem.parameters[i] = there[i]->data();
  }
  problem.samples = g.samples;
  problem.channels = g.channels;
  problem.extent = g.extent;
  problem.epilogue = facts.epilogue;
  const bool as_on_cpus = halves == Halves::same_bits;
  Output<char> table_apart(place.has_table ? nnorm::cuda::table_size(problem) : 0, 0);
  const OnDevice<char> table_there(table_apart);
  cudaError_t error = cudaSuccess;
  if (place.has_table) {
    error = nnorm::cuda::prepare(problem, table_there.data(), stream(), as_on_cpus);
    std::fill(std::begin(problem.parameters), std::end(problem.parameters), nullptr);  // the table must suffice
  }
  const void* const table = place.has_table ? table_there.data() : nullptr;
  if (error == cudaSuccess)
    error = g.lanes ? nnorm::cuda::run_channels_last(problem, g.lanes, stream(), as_on_cpus, table)
                    : nnorm::cuda::run(problem, stream(), as_on_cpus, table);
  table_there.fetch(table_apart);
  CHECK(table_apart.guards_hold(), "%s %s: written outside the table", NameOf<T>::value, g.name().c_str());
  CHECK(error == cudaSuccess, "%s %s: %s", NameOf<T>::value, g.name().c_str(), cudaGetErrorString(error));
  y_there.fetch(y);
  CHECK(y.guards_hold(), "%s %s: written outside y", NameOf<T>::value, g.name().c_str());
  return y.values();
}

// Compares every epilogue with the formula, and the results at other addresses and in place with those at aligned ones.
template <class T>
void check_channels(const ChannelGeometry& g, const ChannelParameters<Arithmetic<T>>& p, const std::vector<T>& x,
                    const std::vector<T>& residual, Halves halves, Worst& worst) {
  for (const EpilogueFacts& facts : nnorm::epilogues) {
    std::vector<Wider<T>> reference, size;
    expected([&](size_t i) { return g.padding(i) ? 0 : g.channel_of(i); }, facts, p, widened_all(x), widened_all(residual),
             reference, size);

    const std::string name = std::string(facts.operator_name) + " " + NameOf<T>::value + ", " + g.name();
    const std::vector<T> y = run<T>(g, facts, p, x, residual, {0, 0, 0, Place::apart}, halves);
    const auto again = [&](Place place) { return same_bits(y, run<T>(g, facts, p, x, residual, place, halves)); };
    CHECK(again({1, 1, 1, Place::apart}), "%s: one element off a boundary", name.c_str());
    CHECK(again({0, 1, 3, Place::apart}), "%s: each tensor off by another number", name.c_str());
    CHECK(again({1, 1, 1, Place::over_x}), "%s: in place", name.c_str());
    CHECK(again({0, 0, 0, Place::apart, true}), "%s: with a table", name.c_str());
    CHECK(again({1, 0, 3, Place::apart, true}), "%s: with a table, each tensor off by another number", name.c_str());
    if (facts.takes_residual) CHECK(again({3, 3, 3, Place::over_residual}), "%s: over the residual", name.c_str());
    for (size_t i = 0; i < g.size(); ++i) {
      const double value = double(nnorm::widened(y[i]));
      if (g.padding(i))
        CHECK(value == 0, "%s: padding is %g", name.c_str(), value);
      else if (std::isnan(reference[i]) || std::isnan(value))
        CHECK(std::isnan(reference[i]) && std::isnan(value), "%s: %g becomes %g", name.c_str(), double(reference[i]), value);
      else
        worst.see((double(std::fabs(nnorm::widened(y[i]) - reference[i])) - last_rounding<T>(double(reference[i]))) /
                      double(size[i]),
                  double(nnorm::widened(x[i])), value);
    }
  }
}

template <class T>
void test_batch_normal_norm(ErrorTable& errors, Halves halves, double bound, const Selection& selection) {
  Random random(1);
  Worst worst;
  for (const ChannelGeometry& g : selection.of(channel_geometries())) {
    const size_t n = g.size();
    std::vector<double> numbers(n), others(n);
    for (double& value : numbers) value = random.below(50) ? 2 * random.normal() : 0;
    for (double& value : others) value = random.normal();
    if (n > 4) numbers[random.below(n)] = NAN;  // the result must be NaN only there
    const ChannelParameters<Arithmetic<T>> p(g.channels, random);
    check_channels<T>(g, p, to_type<T>(numbers), to_type<T>(others), halves, worst);
  }
  errors.add("batch_normal_norm, " + name_of<T>(halves), bound, on_gpu ? "gpu" : "host", worst);
}

// 16-bit tensors are computed in one of two ways, which the greatest element of an access decides: here few accesses
// have a greater one than their channel's limit, or half of them, or nearly all.
template <class T>
void test_ranges(ErrorTable& errors, Halves halves, double bound) {
  Random random(5);
  Worst worst;
  const double great = std::is_same_v<T, nnorm::Float16> ? 6e4 : 1e20;
  for (const ChannelGeometry& g :
       {ChannelGeometry{3, 5, 256, 0}, {40, 5, 256, 0}, {80, 5, 256, 0}, {2, 3, 3001, 0}, {17, 60, 49, 0}, {1, 40, 49, 0},
        {70, 64, 1, 0}, {67, 13, 1, 16}, {67, 16, 1, 16}})
    for (const unsigned rarity : {1000, 8, 2}) {
      ChannelParameters<Arithmetic<T>> p(g.channels, random);
      for (size_t c = 0; c < g.channels; ++c) {
        if (random.below(3)) {
          p.pos[c] = Arithmetic<T>(random.uniform(-0.3, 0.3)), p.neg[c] = -p.pos[c];
          p.scale[c] = Arithmetic<T>(random.below(2) ? 0x1p31 / great * random.uniform(1, 1.1) : 1);
        } else {  // 2^z would be infinite, times 0, if it did not saturate; exponents above 4 have no limit
          p.pos[c] = p.neg[c] = Arithmetic<T>(4 + random.below(2));
          p.scale[c] = Arithmetic<T>(0x1p34 / great), p.weight[c] = 0;
        }
      }
      std::vector<double> numbers(g.size()), others(g.size());
      for (double& value : numbers)
        value = random.below(rarity) ? 2 * random.normal() : random.sign() * great * random.uniform(0.8, 1);
      for (double& value : others) value = random.normal();
      check_channels<T>(g, p, to_type<T>(numbers), to_type<T>(others), halves, worst);
    }
  errors.add("ranges of batch_normal_norm, " + name_of<T>(halves), bound, on_gpu ? "gpu" : "host", worst);
}

template <class T>
void test_type(ErrorTable& errors, Halves halves, double bound_of_channels, double bound_of_rows,
               const Selection& selection) {
  test_batch_normal_norm<T>(errors, halves, bound_of_channels, selection);
  if (halves == Halves::by_device) test_ranges<T>(errors, halves, bound_of_channels);
  test_layer_group_normal_norm<T>(errors, halves, bound_of_rows, selection);
  test_bad_rows<T>(halves);
  test_steep_rows<T>(halves);
  if constexpr (sizeof(T) == 2)
    if (halves == Halves::by_device) test_shapes<T>(errors, selection);
}

}  // namespace
}  // namespace nnorm_test

int main(int count, char** arguments) {
  using namespace nnorm_test;
  if (!have_device()) {
    std::printf("skipped: no GPU that CUDA can use\n");
    return skipped;
  }
  Selection selection;
  if (count > 1) selection.longest_row = size_t(std::strtoull(arguments[1], nullptr, 10));
  if (count > 2) selection.step = std::max(size_t(std::strtoull(arguments[2], nullptr, 10)), size_t(1));
  ErrorTable errors(0);
  const auto test = [&](auto of_type, Halves halves, double bound_of_channels, double bound_of_rows) {
    test_type<decltype(of_type)>(errors, halves, bound_of_channels, bound_of_rows, selection);
    ++selection.first;
  };
  test(float(), Halves::same_bits, 3e-7, 1e-6);
  if (have_reference_for_double) test(double(), Halves::same_bits, 5e-16, 3e-15);
  if (have_same_bits_of_halves) {
    test(nnorm::Float16(), Halves::same_bits, 3e-7, 1e-6);
    test(nnorm::BFloat16(), Halves::same_bits, 3e-7, 1e-6);
  }
  test(nnorm::Float16(), Halves::by_device, 0x1p-15, 0x1p-15);
  test(nnorm::BFloat16(), Halves::by_device, 0x1p-15, 0x1p-15);
#if defined(NNORM_CUDA_ON_HOST)
  test_kernels_of_rows();
  // Rows of 20000 elements are among all shapes.
  CHECK(cuda_on_host::have_clusters_run || selection.longest_row < 20000, "no row was computed by a cluster");
#endif
  errors.print_and_check();
  return finish();
}
