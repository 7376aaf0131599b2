// One answer on every processor: the kernels of all instruction sets that this machine can run give the same bits, for any
// bits of x, in any layout, at any place of a batch, and with an epilogue what the steps behind the operator would.
//
//   test_same_bits [VALUES]    of each type and operator (default 1.5 million); a long run takes 1000000000
//
// It prints the digests of what each instruction set computed, for comparison with other machines: the program draws the
// same numbers everywhere (make same-bits-neon).
#include <cstdlib>
#include <string>

#include "bits.h"
#include "check.h"

namespace nnorm_test {
namespace {


struct Count {
  size_t compared = 0, different = 0;

  template <class T>
  void add(const std::vector<T>& a, const std::vector<T>& b) {
    compared += a.size();
    for (size_t i = 0; i < a.size(); ++i) different += differ(a[i], b[i]);
  }
};

// What one instruction set computed, in 64 bits.
struct Digest {
  const char* target;
  uint64_t bits;

  template <class T>
  void add(const std::vector<T>& y) {
    for (const T& value : y) {
      uint64_t of_value = 0;
      std::memcpy(&of_value, &value, sizeof value);
      bits = (bits ^ (is_nan(value) ? ~uint64_t(0) : of_value)) * 0x9e3779b97f4a7c15;
      bits ^= bits >> 29;
    }
  }
};

std::vector<Digest> digests() {
  std::vector<Digest> result;
  for (const Target* const* target = nnorm::targets(); *target; ++target) result.push_back({(*target)->name, 0});
  return result;
}

void print(const std::vector<Digest>& digests, const char* operators, const char* type, size_t values) {
  for (const Digest& digest : digests)
    std::printf("digest %s %s %zu %016llx %s\n", operators, type, values, (unsigned long long)digest.bits, digest.target);
}

template <class T>
std::vector<T> apply_behind(nnorm::Epilogue epilogue, const std::vector<T>& y, const std::vector<T>& residual) {
  std::vector<T> result(y.size());
  for (size_t i = 0; i < y.size(); ++i) result[i] = true_epilogue<T>(epilogue, y[i], residual[i]);
  return result;
}

template <class T>
void test_channels(size_t values) {
  Random random(1);
  Count across, layouts, behind;
  std::vector<Digest> of_targets = digests();
  size_t digested = 0;
  for (size_t round = 0; digested < values; ++round) {
    const size_t channels = 16 * (1 + random.below(6)), extent = 1 + random.below(300), samples = 1 + random.below(3);
    const ChannelParameters<Arithmetic<T>> p(channels, random);
    const std::vector<T> x = numbers<T>(samples * channels * extent, Kind(round % 3), random);
    const std::vector<T> residual = numbers<T>(x.size(), Kind(round / 3 % 3), random);
    std::vector<T> plain;  // without an epilogue
    for (const EpilogueFacts& facts : nnorm::epilogues) {
      const auto compute = [&](const Target& target, Sharing sharing, size_t lanes) {
        const Layout layout{sharing, samples, channels, extent, lanes};
        return batch_normal_norm<T>(target, layout, facts.epilogue, p, x, residual);
      };
      const std::vector<T> y = compute(nnorm::best_target(), Sharing::row, 0);
      digested += y.size();
      for (const Target* const* target = nnorm::targets(); *target; ++target) {
        const std::vector<T> y_there = compute(**target, Sharing::row, 0);
        across.add(y, y_there);
        of_targets[size_t(target - nnorm::targets())].add(y_there);
        layouts.add(y, compute(**target, Sharing::element, 0));
        for (const size_t lanes : {8, 16}) layouts.add(y, compute(**target, Sharing::lane, lanes));
      }
      if (facts.epilogue == nnorm::Epilogue::none) plain = y;
      // An epilogue of 16 bits rounds once, where the steps behind the operator round after each.
      if constexpr (std::is_same_v<T, Arithmetic<T>>) behind.add(y, apply_behind(facts.epilogue, plain, residual));
    }
  }
  const char* type = NameOf<T>::value;
  std::printf("BatchNormalNorm %-9s %11zu values: %zu differ between processors, %zu between layouts, %zu from steps behind\n",
              type, across.compared + layouts.compared + behind.compared, across.different, layouts.different,
              behind.different);
  print(of_targets, "BatchNormalNorm", type, digested);
  CHECK(digested >= values && across.different == 0, "%s between processors", type);
  CHECK(layouts.different == 0, "%s between layouts", type);
  CHECK(behind.different == 0, "%s from steps behind", type);
}

// Row `row` of a problem by itself.
template <class T>
std::vector<T> alone(const Target& target, const Rows<T>& problem, size_t row) {
  const RowGeometry& g = problem.geometry;
  std::vector<T> y(g.row_length);
  RowProblem<T> work = problem.work(problem.x.data() + row * g.row_length, y.data());
  const size_t weights = row % g.period * (g.row_length / g.run);
  work.rows = work.period = 1;
  work.weight += weights;
  work.bias += weights;
  target.table<T>().layer_group_normal_norm(work, 0, nnorm::count_items(work));
  return y;
}

template <class T>
void test_rows(size_t values) {
  Random random(2);
  Count across, places;
  std::vector<Digest> of_targets = digests();
  size_t digested = 0;
  constexpr size_t special[] = {1, 2, 7, 8, 15, 16, 17, 33, 197, 511, 512, 513, 768, 1023, 1024, 1025, 4095, 4096, 4097, 9000, 17000};
  for (size_t round = 0; digested < values; ++round) {
    const size_t picked = random.below(2 * std::size(special));
    const size_t length = picked < std::size(special) ? special[picked] : 1 + random.below(600);
    const size_t rows = 1 + random.below(1 + 4000 / length), period = 1 + random.below(3);
    const size_t run = length % 3 == 0 && random.below(2) ? length / 3 : 1;
    Rows<T> problem({rows, length, period, run}, std::vector<double>(rows * length), random);
    problem.x = numbers<T>(rows * length, Kind(round % 3), random);
    if (round % 5 == 0) problem.epsilon = random.below(2) ? 0 : 1e-3;
    if (round % 7 == 0) problem.delta = 0;
    const std::vector<T> y = layer_group_normal_norm(nnorm::best_target(), problem, problem.x);
    digested += y.size();
    for (const Target* const* target = nnorm::targets(); *target; ++target) {
      const std::vector<T> y_there = layer_group_normal_norm(**target, problem, problem.x);
      across.add(y, y_there);
      of_targets[size_t(target - nnorm::targets())].add(y_there);
    }
    const size_t row = random.below(rows);
    places.add({y.begin() + long(row * length), y.begin() + long((row + 1) * length)},
               alone(nnorm::best_target(), problem, row));
  }
  const char* type = NameOf<T>::value;
  std::printf("LayerNormalNorm, GroupNormalNorm %-9s %11zu values: %zu differ between processors, %zu from a row alone\n", type,
              across.compared + places.compared, across.different, places.different);
  print(of_targets, "LayerNormalNorm", type, digested);
  CHECK(digested >= values && across.different == 0, "%s between processors", type);
  CHECK(places.different == 0, "%s from a row alone", type);
}

}  // namespace
}  // namespace nnorm_test

int main(int count, char** arguments) {
  using namespace nnorm_test;
  const size_t values = count > 1 ? size_t(std::strtoull(arguments[1], nullptr, 10)) : 1500000;
  for (const Target* const* target = nnorm::targets(); *target; ++target) std::printf("%s ", (*target)->name);
  std::printf("\n");
#define NNORM_TEST(T)        \
  test_channels<T>(values); \
  test_rows<T>(values);
  NNORM_FOR_EACH_TYPE(NNORM_TEST)
#undef NNORM_TEST
  return finish();
}
