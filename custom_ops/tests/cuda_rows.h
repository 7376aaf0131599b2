// Tests of the CUDA kernels of LayerNormalNorm and GroupNormalNorm, which test_cuda_kernels.cpp runs.
#pragma once

#include <algorithm>

#include "cuda_memory.h"
#include "halves.h"
#include "kernel_cases.h"
#include "row_shapes.h"

namespace nnorm_test {

// How many rows of a length a test has, at least `few`: without a GPU so many short ones that a warp has several.
inline size_t rows_of(size_t length, size_t few) { return length <= 520 ? 67 : few; }

// Lengths around the limits of each kernel: multiples of 64 for a part of a warp, 256 to 1536 for a warp, 4096 and 16384 for
// a block, 131072 for a cluster, then shared memory, of which a kernel gets 48 KiB without asking for more: 6144 doubles,
// 12288 floats, 24576 narrow numbers. Clusters have 2 to 8 blocks of 4 to 16 warps, some of them without elements. Weights
// are found by element, by access and by run. Without a GPU, there are more rows than clusters run at once, and of the tables
// of weights one is for all rows of a warp, one for some of them, one for a single row; on a GPU, test_cuda_same_bits has so
// many rows.
inline std::vector<RowGeometry> row_geometries(size_t longest_row) {
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

#if defined(NNORM_CUDA_ON_HOST)
// That those kernels ran which nnorm::cuda::threads_of_row() names: by their blocks, four warps each, or one of few rows.
template <class T>
void expect_blocks(size_t count, size_t length, unsigned expected) {
  Random random(6);
  run(Rows<T>({count, length, 1, 1}, normal_numbers(count * length, random), random), {0, 0, 0, Place::apart},
      Halves::by_device);
  const unsigned found = cuda_on_host::last_grid;
  CHECK(found == expected, "%s %zux%zu: %u blocks", NameOf<T>::value, count, length, found);
}

inline void test_kernels_of_rows() {
  expect_blocks<float>(2, 768, 2);            // a block has one row
  expect_blocks<float>(3, 768, 1);            // a warp has one
  expect_blocks<float>(67, 128, 9);           // a warp has two
  expect_blocks<nnorm::Float16>(67, 256, 5);  // a warp has four
  expect_blocks<double>(67, 128, 17);
}
#endif

}  // namespace nnorm_test
