// The kernels of all instruction sets that this machine can run give the same bits, for any bits of x, in any layout,
// at any place of a batch. An epilogue gives the bits of separate operators.
//
//   test_same_bits [digests] [VALUES [TYPE [BatchNormalNorm | LayerNormalNorm]]]
//
// VALUES of each type and operator (default 1.5 million); a long run takes 1000000000. The program prints a digest of
// the values of each instruction set, for comparison with other machines: it draws the same numbers everywhere (make
// same-bits-neon). `digests` is for emulated processors, which are slow: each value is computed once, in one layout and
// with one epilogue, and digests are printed at each tenth of the values.
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

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

// A 64-bit digest of the values that one instruction set computed.
struct Digest {
  const char* instruction_set;
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
  for (const InstructionSet* const* next = nnorm::instruction_sets(); *next; ++next) result.push_back({(*next)->name, 0});
  return result;
}

void print(const std::vector<Digest>& digests, const char* operators, const char* type, size_t values) {
  for (const Digest& digest : digests)
    std::printf("digest %s %s %zu %016llx %s\n", operators, type, values, (unsigned long long)digest.bits,
                digest.instruction_set);
}

template <class T>
std::vector<T> apply_behind(nnorm::Epilogue epilogue, const std::vector<T>& y, const std::vector<T>& residual) {
  std::vector<T> result(y.size());
  for (size_t i = 0; i < y.size(); ++i) result[i] = true_epilogue<T>(epilogue, y[i], residual[i]);
  return result;
}

template <class T>
struct Channels {
  size_t samples, channels, extent;
  ChannelParameters<Arithmetic<T>> parameters;
  std::vector<T> x, residual;

  Channels(size_t round, Random& random)
      : samples(1 + random.below(3)),
        channels(16 * (1 + random.below(6))),
        extent(1 + random.below(300)),
        parameters(channels, random),
        x(numbers<T>(samples * channels * extent, Kind(round % 3), random)),
        residual(numbers<T>(x.size(), Kind(round / 3 % 3), random)) {}

  // Computes in any layout. The elements are returned in the order of rows.
  std::vector<T> compute(const InstructionSet& set, Sharing sharing, size_t lanes, nnorm::Epilogue epilogue) const {
    return batch_normal_norm<T>(set, {sharing, samples, channels, extent, lanes}, epilogue, parameters, x, residual);
  }
};

template <class T>
void test_channels(size_t values) {
  Random random(1);
  Count across, layouts, behind;
  std::vector<Digest> of_sets = digests();
  size_t digested = 0;
  for (size_t round = 0; digested < values; ++round) {
    const Channels<T> problem(round, random);
    std::vector<T> plain;  // without an epilogue
    for (const EpilogueFacts& facts : nnorm::epilogues) {
      const auto compute = [&](const InstructionSet& set, Sharing sharing, size_t lanes) {
        return problem.compute(set, sharing, lanes, facts.epilogue);
      };
      const std::vector<T> y = compute(nnorm::best_instruction_set(), Sharing::row, 0);
      digested += y.size();
      for (const InstructionSet* const* next = nnorm::instruction_sets(); *next; ++next) {
        const std::vector<T> y_there = compute(**next, Sharing::row, 0);
        across.add(y, y_there);
        of_sets[size_t(next - nnorm::instruction_sets())].add(y_there);
        layouts.add(y, compute(**next, Sharing::element, 0));
        for (const size_t lanes : {8, 16}) layouts.add(y, compute(**next, Sharing::lane, lanes));
      }
      if (facts.epilogue == nnorm::Epilogue::none) plain = y;
      // A 16-bit epilogue rounds once, separate operators round each result.
      if constexpr (std::is_same_v<T, Arithmetic<T>>) behind.add(y, apply_behind(facts.epilogue, plain, problem.residual));
    }
  }
  const char* type = NameOf<T>::value;
  std::printf("BatchNormalNorm %-9s %11zu values: %zu differ between processors, %zu between layouts, %zu from steps behind\n",
              type, across.compared + layouts.compared + behind.compared, across.different, layouts.different,
              behind.different);
  print(of_sets, "BatchNormalNorm", type, digested);
  CHECK(digested >= values && across.different == 0, "%s between processors", type);
  CHECK(layouts.different == 0, "%s between layouts", type);
  CHECK(behind.different == 0, "%s from steps behind", type);
}

template <class T>
Rows<T> draw_rows(size_t round, Random& random) {
  constexpr size_t special[] = {1, 2, 7, 8, 15, 16, 17, 33, 197, 511, 512, 513, 768, 1023, 1024, 1025, 4095, 4096, 4097, 9000, 17000};
  const size_t picked = random.below(2 * std::size(special));
  const size_t length = picked < std::size(special) ? special[picked] : 1 + random.below(600);
  // Many rows for each weight, which takes an emulator long to draw.
  const size_t rows = 1 + random.below(1 + 20000 / length), period = 1 + random.below(std::min<size_t>(rows, 3));
  const size_t run = length % 3 == 0 && random.below(2) ? length / 3 : 1;
  Rows<T> problem({rows, length, period, run}, std::vector<double>(rows * length), random);
  problem.x = numbers<T>(rows * length, Kind(round % 3), random);
  if (round % 5 == 0) problem.epsilon = random.below(2) ? 0 : 1e-3;
  if (round % 7 == 0) problem.delta = 0;
  return problem;
}

// Row `row` of a problem by itself.
template <class T>
std::vector<T> alone(const InstructionSet& set, const Rows<T>& problem, size_t row) {
  const RowGeometry& g = problem.geometry;
  std::vector<T> y(g.row_length);
  RowProblem<T> work = problem.work(problem.x.data() + row * g.row_length, y.data());
  const size_t weights = row % g.period * (g.row_length / g.run);
  work.rows = work.period = 1;
  work.weight += weights;
  work.bias += weights;
  set.table<T>().layer_group_normal_norm(work, 0, nnorm::count_items(work));
  return y;
}

template <class T>
void test_rows(size_t values) {
  Random random(2);
  Count across, places;
  std::vector<Digest> of_sets = digests();
  size_t digested = 0;
  for (size_t round = 0; digested < values; ++round) {
    const Rows<T> problem = draw_rows<T>(round, random);
    const std::vector<T> y = layer_group_normal_norm(nnorm::best_instruction_set(), problem, problem.x);
    digested += y.size();
    for (const InstructionSet* const* next = nnorm::instruction_sets(); *next; ++next) {
      const std::vector<T> y_there = layer_group_normal_norm(**next, problem, problem.x);
      across.add(y, y_there);
      of_sets[size_t(next - nnorm::instruction_sets())].add(y_there);
    }
    const size_t row = random.below(problem.geometry.rows), length = problem.geometry.row_length;
    places.add({y.begin() + long(row * length), y.begin() + long((row + 1) * length)},
               alone(nnorm::best_instruction_set(), problem, row));
  }
  const char* type = NameOf<T>::value;
  std::printf("LayerNormalNorm, GroupNormalNorm %-9s %11zu values: %zu differ between processors, %zu from a row alone\n", type,
              across.compared + places.compared, across.different, places.different);
  print(of_sets, "LayerNormalNorm", type, digested);
  CHECK(digested >= values && across.different == 0, "%s between processors", type);
  CHECK(places.different == 0, "%s from a row alone", type);
}

// draw(round) gives a problem, compute(problem, set, round) its result.
template <class T, class Draw, class Compute>
void print_digests(const char* operators, size_t values, Draw draw, Compute compute) {
  std::vector<Digest> of_sets = digests();
  size_t digested = 0, round = 0;
  for (size_t tenth = 1; tenth <= 10; ++tenth) {
    for (; digested < values * tenth / 10; ++round) {
      const auto problem = draw(round);
      digested += problem.x.size();
      for (size_t i = 0; i < of_sets.size(); ++i) of_sets[i].add(compute(problem, *nnorm::instruction_sets()[i], round));
    }
    print(of_sets, operators, NameOf<T>::value, digested);
    std::fflush(stdout);  // keeps the output if the program is stopped
  }
  for (const Digest& digest : of_sets)
    CHECK(digest.bits == of_sets[0].bits, "%s %s on %s", operators, NameOf<T>::value, digest.instruction_set);
}

template <class T>
void digest_channels(size_t values) {
  Random random(1);
  print_digests<T>(
      "BatchNormalNorm", values, [&](size_t round) { return Channels<T>(round, random); },
      [](const Channels<T>& problem, const InstructionSet& set, size_t round) {
        constexpr std::pair<Sharing, size_t> layouts[] = {
            {Sharing::row, 0}, {Sharing::element, 0}, {Sharing::lane, 8}, {Sharing::lane, 16}};
        const auto& [sharing, lanes] = layouts[round / 9 % std::size(layouts)];  // the kinds of numbers repeat after 9
        return problem.compute(set, sharing, lanes, nnorm::epilogues[round / 36 % std::size(nnorm::epilogues)].epilogue);
      });
}

template <class T>
void digest_rows(size_t values) {
  Random random(2);
  print_digests<T>(
      "LayerNormalNorm", values, [&](size_t round) { return draw_rows<T>(round, random); },
      [](const Rows<T>& problem, const InstructionSet& set, size_t) {
        return layer_group_normal_norm(set, problem, problem.x);
      });
}

template <class T>
void test(bool only_digests, size_t values, const Only& only) {
  if (!only.type_is<T>()) return;
  if (only.channels()) (only_digests ? digest_channels<T> : test_channels<T>)(values);
  if (only.rows()) (only_digests ? digest_rows<T> : test_rows<T>)(values);
}

}  // namespace
}  // namespace nnorm_test

int main(int count, char** arguments) {
  using namespace nnorm_test;
  const bool only_digests = count > 1 && !std::strcmp(arguments[1], "digests");
  count -= only_digests, arguments += only_digests;
  const size_t values = count > 1 ? size_t(std::strtoull(arguments[1], nullptr, 10)) : 1500000;
  const Only only{count > 2 ? arguments[2] : "", count > 3 ? arguments[3] : ""};
  for (const InstructionSet* const* next = nnorm::instruction_sets(); *next; ++next) std::printf("%s ", (*next)->name);
  std::printf("\n");
#define NNORM_TEST(T) test<T>(only_digests, values, only);
  NNORM_FOR_EACH_TYPE(NNORM_TEST)
#undef NNORM_TEST
  return finish();
}
