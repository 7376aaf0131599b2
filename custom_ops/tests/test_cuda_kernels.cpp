// Compares the CUDA kernels with loops over the formulas: every type, epilogue, kernel and access width, unusual sizes
// and addresses, results in place. CMake builds this twice: for the CPU (cuda_on_host.h), and with CUDA.
//
//   test_cuda_kernels [LENGTH [N]]    of the longest row (default 2^20); each N-th size, for tools that slow it down
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>

#include "channels.h"
#include "check.h"
#include "cuda_memory.h"
#include "halves.h"
#include "row_shapes.h"

namespace nnorm_test {
namespace {

using nnorm::ChannelProblem;

// Where the tensors are: how many elements after a boundary each starts, and whether y overwrites an input. `other` is
// the residual, or weight and bias of rows.
struct Place {
  size_t x, other, y;
  enum { apart, over_x, over_residual } result;
  bool has_table = false;  // of the channels
};

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

// What the program was asked for: no longer rows, and each `step`-th size. Each type begins with another size.
struct Selection {
  size_t longest_row = 1 << 20, step = 1, first = 0;

  template <class Geometry>
  std::vector<Geometry> of(const std::vector<Geometry>& all) const {
    std::vector<Geometry> chosen;
    for (size_t i = first % step; i < all.size(); i += step) chosen.push_back(all[i]);
    return chosen;
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

// How many rows of a length a test has, at least `few`: without a GPU so many short ones that a warp has several.
size_t rows_of(size_t length, size_t few) { return length <= 520 ? 67 : few; }

// Lengths around the limits of each kernel: multiples of 64 for a part of a warp, 256 to 1536 for a warp, 4096 and 16384 for a block, 131072 for a
// cluster, then shared memory, of which a kernel gets 48 KiB without asking for more: 6144 doubles, 12288 floats, 24576
// narrow numbers. Clusters have 2 to 8 blocks of 4 to 16 warps, some of them without elements. Weights are found by element,
// by access and by run. Without a GPU, there are more rows than clusters run at once, and of the tables of weights one is
// for all rows of a warp, one for some of them, one for a single row; on a GPU, test_cuda_same_bits has so many rows.
std::vector<RowGeometry> row_geometries(size_t longest_row) {
  std::vector<RowGeometry> all{{0, 5, 1, 1},     {3, 0, 1, 1},     {1, 6144, 1, 1},
                               {1, 3003, 1, 3},  {1, 4096, 1, 1},  {1, 12288, 1, 1},
                               {1, 24576, 1, 1}, {1, 30001, 1, 1},
                               {2, 60000, 2, 60000}, {1, longest_row, 1, longest_row / 4},
                               {7, 16392, 3, 1}, {5, 25088, 2, 3136}, {3, 33000, 1, 3}, {2, 65536, 1, 1}, {3, 65544, 1, 1},
                               {2, 131072, 1, 16}, {1, 131080, 1, 1}, {70, 784, 3, 49},
                               {140, 64, 32, 16}, {67, 384, 5, 16}, {67, 256, 3, 64}, {2, 768, 2, 16}, {2, 515, 2, 5},
                               {9, 3136, 2, 49}, {11, 6272, 5, 196}, {26, 1176, 4, 49}, {7, 25088, 3, 784}};
  for (const size_t length : {1,    2,    31,   33,   49,   64,   68,   128,  136,  192,  196,   255,   256,  257,  258,
                              264,  320,  384,  388,  512,  513,  520,  768,  1023, 1024, 1025,  1028,  1280, 1288, 1536,
                              1544, 2048, 2049, 3072, 4096, 4097, 5000, 8192, 16384, 16385}) {
    all.push_back({2, length, 1, 1});
    all.push_back({5, length, 3, 1});
    all.push_back({rows_of(length, 3), length, 5, 1});
    for (const size_t run : {3, 7, 16, 64, 257})
      if (length % run == 0) all.push_back({4, length, 2, run});
  }
  all.erase(std::remove_if(all.begin(), all.end(), [=](const RowGeometry& g) { return g.row_length > longest_row; }), all.end());
  return all;
}

template <class T>
std::vector<T> run(const Rows<T>& rows, Place place, Halves halves) {
  Input<T> apart(rows.x, place.x);
  Output<T> y = place.result == Place::over_x ? Output<T>(rows.x, place.y) : Output<T>(rows.x.size(), place.y);
  Input<Arithmetic<T>> weight(rows.weight, place.other), bias(rows.bias, place.other);
  const OnDevice<T> x_there(apart), y_there(y);
  const OnDevice<Arithmetic<T>> weight_there(weight), bias_there(bias);
  nnorm::RowProblem<T> problem = rows.work(place.result == Place::over_x ? y_there.data() : x_there.data(), y_there.data());
  problem.weight = weight_there.data();
  problem.bias = bias_there.data();
  const cudaError_t error = nnorm::cuda::run(problem, stream(), halves == Halves::same_bits);
  const RowGeometry& g = rows.geometry;
  CHECK(error == cudaSuccess, "%s %zux%zu: %s", NameOf<T>::value, g.rows, g.row_length, cudaGetErrorString(error));
  y_there.fetch(y);
  CHECK(y.guards_hold(), "%s %zux%zu: written outside y", NameOf<T>::value, g.rows, g.row_length);
  return y.values();
}

template <class T>
void test_layer_group_normal_norm(ErrorTable& errors, Halves halves, double bound, const Selection& selection) {
  Random random(2);
  Worst worst;
  for (const RowGeometry& g : selection.of(row_geometries(selection.longest_row))) {
    const Rows<T> rows(g, normal_numbers(g.rows * g.row_length, random), random);
    const auto run_at = [&](Place place) { return run(rows, place, halves); };
    const std::vector<T> aligned = run_at({0, 0, 0, Place::apart}), off = run_at({1, 1, 3, Place::apart});
    const auto same = [&](Place place, const std::vector<T>& y) { return same_bits(y, run_at(place)); };
    CHECK(same({0, 0, 0, Place::over_x}, aligned), "%s %zux%zu: in place", NameOf<T>::value, g.rows, g.row_length);
    CHECK(same({0, 1, 0, Place::apart}, aligned), "%s %zux%zu: weight and bias off a boundary", NameOf<T>::value, g.rows,
          g.row_length);
    CHECK(same({1, 0, 1, Place::over_x}, off), "%s %zux%zu: in place, off a boundary", NameOf<T>::value, g.rows, g.row_length);
    for (size_t row = 0; row < (g.row_length ? g.rows : 0); ++row) {
      const ReferenceRow<Wider<T>> reference = reference_row(rows, row);
      for (const auto* y : {&aligned, &off})
        for (size_t i = 0; i < g.row_length; ++i) {
          const double error = double(std::fabs(nnorm::widened((*y)[row * g.row_length + i]) - reference.y[i]));
          worst.see((error - last_rounding<T>(double(reference.y[i]))) / double(reference.size[i]), double(g.row_length),
                    double(i));
        }
    }
  }
  errors.add("layer_group_normal_norm, " + name_of<T>(halves), bound, on_gpu ? "gpu" : "host", worst);
}

// A row has the same results alone, by another kernel, as beside other rows. `rows` have the same weights.
template <class T>
void check_alone(const Rows<T>& rows, const std::vector<T>& y, Halves halves) {
  const size_t length = rows.geometry.row_length;
  for (size_t row = 0; row < rows.geometry.rows; ++row) {
    Rows<T> alone = rows;
    alone.geometry.rows = 1;
    alone.x.assign(rows.x.begin() + ptrdiff_t(row * length), rows.x.begin() + ptrdiff_t((row + 1) * length));
    const std::vector<T> found = run(alone, {0, 0, 0, Place::apart}, halves);
    size_t different = 0;
    for (size_t i = 0; i < length; ++i) {
      const T& expected = y[row * length + i];
      const bool are_nan = std::isnan(nnorm::widened(expected)) && std::isnan(nnorm::widened(found[i]));
      different += !are_nan && std::memcmp(&expected, &found[i], sizeof(T)) != 0;
    }
    CHECK(different == 0, "%s: row %zu of length %zu has other results alone", NameOf<T>::value, row, length);
  }
}

// Rows whose deviation is far below √ε have exponents so great that 2^z saturates, which the kernels test once for each
// row.
template <class T>
void test_steep_rows(Halves halves) {
  constexpr bool finite = !std::is_same_v<T, nnorm::Float16>;  // a value at these limits is infinite in float16
  Random random(4);
  unsigned at_limits = 0;
  for (const size_t length : {64, 300, 768, 1000, 1024, 4096})
    for (const double spread : {1e-3, 3e-3, 1e-2, 1e-1}) {
      const RowGeometry g{rows_of(length, 8), length, 1, 1};
      std::vector<double> numbers(g.rows * length);
      for (double& value : numbers) value = -spread * std::log(random.uniform());
      Rows<T> rows(g, numbers, random);
      rows.epsilon = 1;
      rows.delta = 0;
      std::fill(rows.weight.begin(), rows.weight.end(), 1);
      std::fill(rows.bias.begin(), rows.bias.end(), 0);
      const std::vector<T> y = run(rows, {0, 0, 0, Place::apart}, halves);
      check_alone(rows, y, halves);
      for (size_t row = 0; row < g.rows; ++row) {
        const double lmbda = double(reference_row(rows, row).lmbda.lmbda);
        double mean = 0;
        for (size_t i = 0; i < length; ++i) mean += double(nnorm::widened(rows.x[row * length + i])) / double(length);
        for (size_t i = row * length; i < (row + 1) * length; ++i) {
          const double h = double(nnorm::widened(rows.x[i])) - mean, value = double(nnorm::widened(y[i]));
          CHECK((finite ? std::isfinite(value) : !std::isnan(value)) && (std::fabs(h) < 1e-6 || value * h >= 0),
                "%s, %zu of spread %g, lambda %g: %g becomes %g", NameOf<T>::value, length, spread, lmbda, h, value);
          at_limits += std::fabs(lmbda * std::log2(1 + std::fabs(h))) > 130;
        }
      }
    }
  CHECK(at_limits > 1000, "%s: only %u elements reach the limits of 2^z", NameOf<T>::value, at_limits);
}

// Rows with NaN or infinity become NaN, with ε = 0 also rows of equal elements. Their neighbors are unaffected.
template <class T>
void test_bad_rows(Halves halves) {
  Random random(3);
  for (const size_t length : {3, 64, 256, 384, 1000, 4096, 5001}) {
    const size_t count = rows_of(length, 6);
    Rows<T> clean({count, length, 1, 1}, normal_numbers(count * length, random), random);
    clean.epsilon = 0;
    Rows<T> corrupted = clean;
    nnorm::narrow(Arithmetic<T>(NAN), corrupted.x[length + length / 2]);
    nnorm::narrow(Arithmetic<T>(-INFINITY), corrupted.x[4 * length - 1]);
    for (size_t i = 0; i < length; ++i) nnorm::narrow(Arithmetic<T>(1), corrupted.x[4 * length + i]);
    const Place apart{0, 0, 0, Place::apart};
    const std::vector<T> expected = run(clean, apart, halves), y = run(corrupted, apart, halves);
    check_alone(corrupted, y, halves);
    for (size_t i = 0; i < y.size(); ++i) {
      const size_t row = i / length;
      const bool bad = row == 1 || row == 3 || row == 4, is_nan = std::isnan(nnorm::widened(y[i]));
      CHECK(bad ? is_nan : !is_nan && std::memcmp(&y[i], &expected[i], sizeof(T)) == 0,
            "%s: row %zu of length %zu is %g", NameOf<T>::value, row, length, double(nnorm::widened(y[i])));
    }
  }
}

// Neighboring rows have different shapes; without a GPU, those of one warp, block or cluster after the other too.
template <class T>
void test_shapes(ErrorTable& errors, const Selection& selection) {
  Random random(5);
  Worst worst;
  Decisions decisions;
  for (const size_t length : {64, 128, 192, 256, 300, 384, 512, 768, 1000, 1024, 1536, 2048, 4096, 5000, 20000}) {
    if (length > selection.longest_row) continue;
    const RowGeometry g{rows_of(length, length < 2000 ? 23 : 7), length, 1, 1};
    std::vector<double> numbers(g.rows * length);
    for (size_t i = 0; i < numbers.size(); ++i)
      numbers[i] = draw(Shape(i / length % size_t(Shape::count)), i % length == 0, random);
    Rows<T> rows(g, numbers, random);
    for (const double delta : {0.0, reference_delta}) {
      rows.delta = delta;
      const std::vector<T> y = run(rows, {0, 0, 0, Place::apart}, Halves::by_device);
      const std::vector<T> off = run(rows, {1, 1, 1, Place::apart}, Halves::by_device);
      if (length <= 16384)
        CHECK(same_bits(y, off), "%s: rows of length %zu have other results off a boundary", NameOf<T>::value, length);
      check_alone(rows, y, Halves::by_device);
      for (size_t row = 0; row < g.rows; ++row) {
        const ReferenceRow<double> reference = reference_row(rows, row);
        decisions.add(rows, row, reference.lmbda.lmbda);
        const double of_lmbda = 1 + reference.lmbda.condition / 100;  // λ̂ of some shapes magnifies all errors
        for (size_t i = 0; i < length; ++i)
          for (const auto* results : {&y, &off}) {
            const double error = std::fabs(double(nnorm::widened((*results)[row * length + i])) - reference.y[i]);
            worst.see((error - last_rounding<T>(reference.y[i])) / (reference.size[i] * of_lmbda), double(length),
                      double(row));
          }
      }
    }
  }
  decisions.check(NameOf<T>::value);
  errors.add("rows of all shapes, " + name_of<T>(Halves::by_device), 0x1p-15, on_gpu ? "gpu" : "host", worst);
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
  // Rows of 20000 elements are among all shapes.
  CHECK(cuda_on_host::have_clusters_run || selection.longest_row < 20000, "no row was computed by a cluster");
#endif
  errors.print_and_check();
  return finish();
}
