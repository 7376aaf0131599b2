// Rows that several threads compute together have the bits of rows that one thread computes alone: every type, lengths
// around the shortest that is shared, one and several rows at a time, in place, and with NaN.
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "check.h"
#include "mathematics_table.h"
#include "rows.h"

namespace nnorm_test {
namespace {

using nnorm::RowDivision;
using nnorm::SharedRow;
using nnorm::SharedRows;
using nnorm::TileSums;

constexpr size_t shortest = nnorm::shortest_shared_row;

// Runs items on several threads, from the last item to the first, and records which threads compute a row.
class Threads {
 public:
  explicit Threads(size_t count) : count_(count) {}

  template <class T>
  void run(const SharedRows<T>& work, void (*kernel)(const SharedRows<T>&, size_t, size_t)) {
    std::vector<std::thread> threads;
    for (size_t t = 0; t < count_; ++t)
      threads.emplace_back([&, t] {
        // Thread t has the items t, t + count, …, so that as many threads as possible have an item.
        for (size_t item = count_items(work); item-- > 0;)
          if (item % count_ == t) {
            kernel(work, item, item + 1);
            const std::lock_guard<std::mutex> lock(mutex_);
            workers_.insert({work.begin + item / work.parts, t});
          }
      });
    for (std::thread& thread : threads) thread.join();
  }

  size_t workers_of(size_t row) const {
    size_t workers = 0;
    for (const auto& [of, thread] : workers_) workers += of == row;
    return workers;
  }

 private:
  size_t count_;
  std::mutex mutex_;
  std::set<std::pair<size_t, size_t>> workers_;
};

// Compilers do not keep the sign and the payload of a NaN.
template <class T>
std::vector<T> with_one_nan(std::vector<T> values) {
  for (T& value : values)
    if (std::isnan(nnorm::widened(value))) nnorm::narrow(Arithmetic<T>(NAN), value);
  return values;
}

template <class T>
void compare(const AvailableInstructionSet& set, const Rows<T>& problem, size_t threads, bool in_place) {
  const nnorm::KernelTable<T>& kernels = set.kernels->template table<T>();
  const size_t rows = problem.geometry.rows, length = problem.geometry.row_length;
  std::vector<T> expected(problem.x.size());
  const RowProblem<T> apart = problem.work(problem.x.data(), expected.data());
  kernels.layer_group_normal_norm(apart, 0, nnorm::count_items(apart));

  Output<T> y = in_place ? Output<T>(problem.x, 1) : Output<T>(problem.x.size(), 1);
  const RowProblem<T> work = problem.work(in_place ? y.data() : problem.x.data(), y.data());
  const size_t parts = (length + nnorm::elements_per_part - 1) / nnorm::elements_per_part;
  const RowDivision all{0, rows, parts, (length + nnorm::row_tile - 1) / nnorm::row_tile};
  std::vector<TileSums<Arithmetic<T>>> sums(rows * all.tiles);
  std::vector<SharedRow<Arithmetic<T>>> states(rows);
  Threads executor(threads);
  compute_together(work, 0, rows, all, sums.data(), states.data(), kernels,
                   [&](const SharedRows<T>& shared, auto* kernel) { executor.run(shared, kernel); });
  CHECK(y.guards_hold() && same_bits(with_one_nan(y.values()), with_one_nan(expected)),
        "%s %s, %zux%zu, %zu threads%s: other bits than alone", set.name, NameOf<T>::value, rows, length, threads,
        in_place ? ", in place" : "");
  for (size_t row = 0; row < rows; ++row)
    CHECK(executor.workers_of(row) == std::min(threads, parts), "row %zu of %zu: %zu of %zu threads worked on it", row, length,
          executor.workers_of(row), threads);
}

template <class T>
void test_type(const std::vector<AvailableInstructionSet>& sets) {
  Random random(1);
  for (const size_t length : {shortest - 1, shortest, shortest + 3 * nnorm::row_tile + 77})
    for (const size_t rows : {1, 3}) {
      const size_t run = length % 64 == 0 ? 64 : 1;  // the runs of channels of a map, or weights of LayerNormalNorm
      Rows<T> problem({rows, length, 2, run}, normal_numbers(rows * length, random), random);
      if (rows == 3) nnorm::narrow(Arithmetic<T>(NAN), problem.x[length + length / 2]);
      for (const AvailableInstructionSet& set : sets)
        for (const size_t threads : {1, 2, 3, 8})
          if (rows == 1 ? threads % 8 != 2 : threads == 2) compare(set, problem, threads, threads == 2);
    }
}

// The sizes that nnorm/shared_rows.h and the documentation state.
static_assert(nnorm::elements_per_part == nnorm::elements_per_item && shortest == 131072);

// Which rows are shared.
void test_division() {
  Random random(2);
  const auto of = [&](size_t rows, size_t length, size_t threads) {
    RowProblem<float> problem{};
    problem.rows = rows, problem.row_length = length;
    return divide_rows(problem, threads);
  };
  CHECK(of(1, shortest - 1, 8).alone == 1 && of(1, shortest, 8).alone == 0, "the shortest row");
  CHECK(of(1, shortest, 1).alone == 1, "one thread");
  CHECK(of(3, shortest, 2).alone == 2 && of(4, shortest, 2).alone == 4, "what two threads share");
  CHECK(of(3, shortest, 8).alone == 0 && of(5, shortest, 8).alone == 5 && of(12, shortest, 8).alone == 8, "eight threads");
  CHECK(of(4, shortest, 32).at_once == 4 && of(4, 40 * shortest, 8).at_once == 1, "rows at a time");
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  const std::vector<AvailableInstructionSet> sets = available_instruction_sets();
#define NNORM_TEST(T) test_type<T>(sets);
  NNORM_FOR_EACH_TYPE(NNORM_TEST)
#undef NNORM_TEST
  test_division();
  return finish();
}
