// The training kernels: every instruction set gives the same y and noise in bits and the same gradients up to their sums'
// order, for any division into parts. The layout of the tensors changes no bit. Tensors are exactly as long as the kernels may
// read and write (`make test-sanitizers`).
// tests/layers/test_fused.py compares the results with PyTorch's.
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "problem.h"

extern "C" const char* nnorm_training_instruction_set(size_t index);
extern "C" int nnorm_training_run(size_t instruction_set, int is_double, int what, const nnorm::TrainingProblem* problem,
                                  uint64_t first, uint64_t end);

extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1";  // for test_memory()
}

namespace {

using nnorm::Statistic;

// A team whose members work one after the other: machines that are emulated have one thread. tests/layers has teams of threads.
int runs_of_team = 0;
void one_after_the_other(void (*work)(void*), void* data, unsigned, unsigned) {
  ++runs_of_team;
  for (int member = 0; member < 3; ++member) work(data);
}

// Where a problem's sets are, and how they share weights. A run of 0 is the whole set.
struct Shape {
  uint64_t sets, segments, segment_length, period, run;
};

// Sets of 1, of a tile, of more than is kept; segments that a tile cuts; runs across tiles.
constexpr Shape shapes[] = {{1, 1, 1, 1, 1},    {3, 2, 1, 3, 0},      {5, 3, 49, 5, 0},       {2, 3, 1000, 2, 0},  {2, 2, 8209, 2, 0},
                            {40, 1, 19, 1, 1},  {3, 1, 1024, 1, 1},   {4, 1, 2500, 1, 1},     {2, 1, 16390, 1, 1}, {12, 1, 100, 2, 25},
                            {6, 1, 3000, 3, 600}, {9, 1, 45, 3, 0}, {8, 1, 24, 2, 4}};

template <class Real>
std::vector<Real> numbers(uint64_t count, uint32_t seed) {
  std::vector<Real> values(count);
  for (Real& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = Real(seed >> 8) / Real(1 << 22) - Real(1.8);
  }
  return values;
}

// [columns][rows] of [rows][columns].
template <class Real>
std::vector<Real> transposed(const std::vector<Real>& values, uint64_t rows, uint64_t columns) {
  std::vector<Real> result(values.size());
  for (uint64_t row = 0; row < rows; ++row)
    for (uint64_t column = 0; column < columns; ++column) result[column * rows + row] = values[row * columns + column];
  return result;
}

template <class Real>
bool same_bits(const std::vector<Real>& a, const std::vector<Real>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(Real)) == 0;
}

template <class Real>
struct Results {
  std::vector<Real> y, statistics, gradient_x, gradient_weight, gradient_bias, noise;
};

template <class Real>
Results<Real> run(size_t instruction_set, const Shape& shape, const nnorm::TrainingProblem& settings, uint64_t parts,
                  bool side_by_side = false) {
  const uint64_t length = shape.segments * shape.segment_length, run = shape.run ? shape.run : length;
  const uint64_t size = shape.sets * length, weights = shape.period * (length / run);
  const uint64_t rows = shape.sets > shape.period ? parts : 1;
  auto x = numbers<Real>(size, 1), gradient = numbers<Real>(size, 2);
  if (side_by_side) {
    x = transposed(x, shape.sets, length);
    gradient = transposed(gradient, shape.sets, length);
  }
  const auto weight = numbers<Real>(weights, 3), bias = numbers<Real>(weights, 4);
  Results<Real> results{std::vector<Real>(size),           std::vector<Real>(size_t(Statistic::count) * shape.sets),
                        std::vector<Real>(size),           std::vector<Real>(rows * weights),
                        std::vector<Real>(rows * weights), std::vector<Real>(size)};
  nnorm::TrainingProblem problem = settings;
  problem.x = x.data();
  problem.weight = weight.data();
  problem.bias = bias.data();
  problem.y = results.y.data();
  problem.statistics = results.statistics.data();
  problem.gradient = gradient.data();
  problem.gradient_x = results.gradient_x.data();
  problem.gradient_weight = results.gradient_weight.data();
  problem.gradient_bias = results.gradient_bias.data();
  problem.sets = shape.sets;
  problem.segments = shape.segments;
  problem.segment_length = problem.set_stride = shape.segment_length;
  problem.segment_stride = shape.sets * shape.segment_length;
  problem.element_stride = 1;
  if (side_by_side) {
    problem.set_stride = 1;
    problem.element_stride = shape.sets;
  }
  problem.period = shape.period;
  problem.run = run;
  problem.parts = parts;
  for (int what = 0; what < 2; ++what)
    for (uint64_t part = parts; part-- > 0;)
      CHECK(nnorm_training_run(instruction_set, sizeof(Real) == 8, what, &problem, part, part + 1) == 0, "pass %d", what);
  Results<Real> by_team = results;
  problem.team = one_after_the_other;
  const int runs_before = runs_of_team;
  problem.y = by_team.y.data();
  problem.statistics = by_team.statistics.data();
  problem.gradient_x = by_team.gradient_x.data();
  for (auto* tensor : {&by_team.gradient_weight, &by_team.gradient_bias}) tensor->assign(tensor->size(), Real(0));
  problem.gradient_weight = by_team.gradient_weight.data();
  problem.gradient_bias = by_team.gradient_bias.data();
  for (int what = 0; what < 2; ++what)
    CHECK(nnorm_training_run(instruction_set, sizeof(Real) == 8, what, &problem, 0, parts) == 0, "pass %d of a team", what);
  CHECK(runs_of_team == runs_before + 2, "the team ran %d times", runs_of_team - runs_before);
  CHECK(same_bits(by_team.y, results.y) && same_bits(by_team.statistics, results.statistics) &&
            same_bits(by_team.gradient_x, results.gradient_x) && same_bits(by_team.gradient_weight, results.gradient_weight) &&
            same_bits(by_team.gradient_bias, results.gradient_bias),
        "a team, %lu sets of %lu", (unsigned long)shape.sets, (unsigned long)length);
  problem.y = results.noise.data();
  CHECK(nnorm_training_run(instruction_set, sizeof(Real) == 8, 2, &problem, 0, parts) == 0, "noise");
  if (side_by_side)
    for (auto* tensor : {&results.y, &results.gradient_x, &results.noise}) *tensor = transposed(*tensor, length, shape.sets);
  return results;
}

template <class Real>
double distance(const std::vector<Real>& a, const std::vector<Real>& b) {
  double greatest = 0, size = 1;
  for (size_t i = 0; i < a.size(); ++i) {
    const double apart = std::fabs(double(a[i]) - double(b[i]));
    if (std::isnan(apart)) return INFINITY;
    greatest = std::fmax(greatest, apart);
    size = std::fmax(size, std::fabs(double(b[i])));
  }
  return greatest / size;
}

template <class Real>
void test_shape(const Shape& shape, const nnorm::TrainingProblem& settings, const char* what) {
  const uint64_t length = shape.segments * shape.segment_length;
  const double tolerance = sizeof(Real) == 8 ? 1e-12 : 1e-4;
  const Results<Real> expected = run<Real>(0, shape, settings, 1);
  for (size_t i = 0; const char* name = nnorm_training_instruction_set(i); ++i) {
    const std::string place = std::string(name) + ", " + what + ", sets of " + std::to_string(length);
    for (uint64_t parts : {uint64_t(1), shape.sets}) {
      const Results<Real> found = run<Real>(i, shape, settings, parts);
      CHECK(same_bits(found.y, expected.y), "y, %s", place.c_str());
      CHECK(same_bits(found.noise, expected.noise), "noise, %s", place.c_str());
      CHECK(same_bits(found.statistics, expected.statistics), "statistics, %s", place.c_str());
      const double apart = distance(found.gradient_x, expected.gradient_x);
      CHECK(apart <= tolerance, "gradient, %s: %g", place.c_str(), apart);
      if (parts > 1) continue;
      const double weights = distance(found.gradient_weight, expected.gradient_weight);
      const double biases = distance(found.gradient_bias, expected.gradient_bias);
      CHECK(weights <= tolerance && biases <= tolerance, "parameters, %s: %g, %g", place.c_str(), weights, biases);
    }
  }
  if (!settings.standardizes) return;
  // A constant that is added to a set changes no result: its gradients add to 0.
  for (uint64_t set = 0; set < shape.sets; ++set) {
    double sum = 0, size = 1;
    for (uint64_t e = 0; e < length; ++e) {
      const uint64_t segment = e / shape.segment_length;
      const double slope = double(expected.gradient_x[(segment * shape.sets + set) * shape.segment_length + e % shape.segment_length]);
      sum += slope;
      size += std::fabs(slope);
    }
    CHECK(std::fabs(sum) <= tolerance * size, "%s, set %lu of %lu: the gradients add to %g", what, (unsigned long)set,
          (unsigned long)length, sum);
  }
}

template <class Real>
void test_side_by_side(uint64_t sets, uint64_t length, const nnorm::TrainingProblem& settings) {
  const Shape shape = {sets, 1, length, sets, 0};
  for (size_t i = 0; const char* name = nnorm_training_instruction_set(i); ++i)
    for (uint64_t parts : {uint64_t(1), uint64_t(2), (sets + 1) / 2, sets}) {
      const Results<Real> expected = run<Real>(i, shape, settings, parts), found = run<Real>(i, shape, settings, parts, true);
      const bool same = same_bits(found.y, expected.y) && same_bits(found.statistics, expected.statistics) &&
                        same_bits(found.gradient_x, expected.gradient_x) && same_bits(found.noise, expected.noise) &&
                        same_bits(found.gradient_weight, expected.gradient_weight) &&
                        same_bits(found.gradient_bias, expected.gradient_bias);
      CHECK(same, "%s, %lu sets of %lu side by side", name, (unsigned long)sets, (unsigned long)length);
    }
}

// The four words of a counter, as the authors of Philox4x32-10 compute them.
std::array<uint32_t, 4> words_of(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t of_first = uint64_t(counter[0]) * 0xD2511F53u, of_third = uint64_t(counter[2]) * 0xCD9E8D57u;
    counter = {uint32_t(of_third >> 32) ^ counter[1] ^ key[0], uint32_t(of_third),
               uint32_t(of_first >> 32) ^ counter[3] ^ key[1], uint32_t(of_first)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

// The answers that the authors of Philox publish (Random123, kat_vectors).
void test_philox() {
  using Four = std::array<uint32_t, 4>;
  CHECK((words_of({0, 0, 0, 0}, {0, 0}) == Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}), "zeros");
  CHECK((words_of({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}) == Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}), "ones");
  CHECK((words_of({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
         Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}),
        "digits of π");
}

// The noise is Box and Muller's transform of Philox's words: counter i gives elements i, i + 256, i + 512, i + 768 of a tile.
void test_noise(const nnorm::TrainingProblem& settings) {
  constexpr uint64_t tile = 1024, quarter = tile / 4, length = 2 * tile + 600;  // the last tile has numbers of all words
  const Shape shape = {3, 1, length, 1, 1};
  for (size_t number = 0; const char* name = nnorm_training_instruction_set(number); ++number) {
    const std::vector<float> noise = run<float>(number, shape, settings, 1).noise;
    std::vector<double> expected;
    for (size_t i = 0; i < noise.size(); ++i) {
      const uint64_t set = i / length, element = i % length, in_tile = element % tile;
      const uint32_t counter = uint32_t(element / tile * quarter + in_tile % quarter);
      const auto words = words_of({counter, 0, uint32_t(set), 0}, {uint32_t(settings.seed), uint32_t(settings.seed >> 32)});
      const size_t in_counter = in_tile / quarter, pair = in_counter / 2 * 2;
      const double u = float((double(words[pair] >> 8) + 0.5) * 0x1p-24);
      const double angle = double(words[pair + 1]) * 0x1p-32 * 2 * std::acos(-1.0);
      expected.push_back(std::sqrt(-2 * std::log(u)) * (in_counter % 2 == 0 ? std::cos(angle) : std::sin(angle)));
    }
    const double apart = distance(std::vector<double>(noise.begin(), noise.end()), expected);
    CHECK(apart <= 3e-7, "%s: the noise is %g from Box and Muller's", name, apart);
  }
}

void test_memory() {
  nnorm::TrainingProblem problem{};
  problem.sets = problem.parts = problem.segments = 1;
  problem.segment_length = problem.run = uint64_t(1) << 60;
  problem.element_stride = 2;
  CHECK(nnorm_training_run(0, 0, 0, &problem, 0, 1) == 1, "arrays of %lu elements", (unsigned long)problem.length());
}

}  // namespace

int main() {
  nnorm::TrainingProblem reference{};
  reference.seed = 0x0123456789abcdef;
  reference.epsilon = 1e-5;
  reference.delta = std::sqrt(1e-5);
  reference.alpha = 1;
  reference.noise = 0.4;
  reference.order = 2;
  reference.standardizes = 1;
  reference.computes_deviation = 1;
  nnorm::TrainingProblem paper = reference, gradient_step = reference;
  paper.delta = 0;
  paper.least_lmbda = -15;
  paper.greatest_lmbda = 17;
  paper.has_range = 1;
  gradient_step.order = 1;
  gradient_step.alpha = 0.5;
  gradient_step.standardizes = gradient_step.computes_deviation = 0;
  gradient_step.noise = 0;
  for (const Shape& shape : shapes) {
    test_shape<float>(shape, reference, "float, reference");
    test_shape<double>(shape, reference, "double, reference");
    test_shape<float>(shape, paper, "float, paper");
    test_shape<double>(shape, gradient_step, "double, gradient step");
  }
  for (uint64_t sets : {1, 3, 17, 33})
    for (uint64_t length : {1, 7, 1030}) {
      test_side_by_side<float>(sets, length, reference);
      test_side_by_side<double>(sets, length, gradient_step);
    }
  test_side_by_side<float>(3, 16390, reference);
  test_philox();
  test_noise(reference);
  test_memory();
  return nnorm_test::finish();
}
