// Solves the operators' problems on CPUs: items are distributed over the threads of the session.
#include "solve.h"

#include <algorithm>

namespace nnorm::ort {
namespace {

// A vectorized loop over an extent, or over a run of elements with one weight, does not pay if it is shorter than
// `short_run`. The parameters are then repeated for each element; those of channels only if at least `enough_samples`
// share them.
constexpr size_t short_run = 16, enough_samples = 4;

template <class Real>
std::vector<Real> repeated(const Real* values, size_t count, size_t times) {
  std::vector<Real> result;
  result.reserve(count * times);
  for (size_t i = 0; i < count; ++i) result.insert(result.end(), times, values[i]);
  return result;
}

template <class T>
void solve_on(const Run& run, const ChannelProblem<T>& problem, MadeOnce* prepared) {
  if (problem.empty()) return;
  const size_t channels = problem.channels, extent = problem.extent;
  const bool each_its_own = extent == 1 || (extent < short_run && problem.samples >= enough_samples);
  const size_t repeat = each_its_own ? extent : 1;
  std::vector<Arithmetic<T>> memory;
  const std::vector<Arithmetic<T>>& table = channel_table(problem, repeat, prepared, memory);
  ChannelWork<T> work = channel_work(problem, table, channels * repeat);
  work.row_length = each_its_own ? channels * extent : extent;
  work.period = each_its_own ? 1 : channels;
  work.sharing = each_its_own ? Sharing::element : Sharing::row;
  run_items(run, work, best_instruction_set().table<T>().batch_normal_norm);
}

// All threads together compute long rows that are fewer than the threads; one thread computes each other row.
template <class T>
void run_rows(const Run& run, const RowProblem<T>& work) {
  const KernelTable<T>& kernels = best_instruction_set().table<T>();
  const RowDivision division = divide_rows(work, Run::machine_threads());
  std::vector<TileSums<Arithmetic<T>>> sums(division.at_once * division.tiles);
  std::vector<SharedRow<Arithmetic<T>>> rows(division.at_once);
  RowProblem<T> alone = work;
  alone.rows = division.alone;
  // A long row's item takes long enough to wake a thread for it.
  const size_t fewest = work.row_length < shortest_shared_row ? Run::fewest_items_to_share : 2;
  run_items(run, alone, kernels.layer_group_normal_norm, fewest);
  for (size_t row = division.alone; row < work.rows; row += division.at_once)
    compute_together(work, row, std::min(row + division.at_once, work.rows), division, sums.data(), rows.data(), kernels,
                     [&](const SharedRows<T>& shared, auto* kernel) { run_items(run, shared, kernel); });
}

template <class T>
void solve_on(const Run& run, const RowProblem<T>& problem, MadeOnce*) {
  if (problem.empty()) return;
  RowProblem<T> work = problem;
  std::vector<Arithmetic<T>> weights, biases;
  if (work.run > 1 && work.run < short_run && work.run < work.row_length) {
    const size_t count = work.period * (work.row_length / work.run);
    weights = repeated(work.weight, count, work.run);
    biases = repeated(work.bias, count, work.run);
    work.weight = weights.data();
    work.bias = biases.data();
    work.run = 1;
  }
  run_rows(run, work);
}

}  // namespace

const OrtMemoryInfoDeviceType device_of_tensors = OrtMemoryInfoDeviceType_CPU;

template <class Problem>
void Run::solve(const Problem& problem, MadeOnce* prepared) const {
  solve_on(*this, problem, prepared);
}

#define NNORM_INSTANTIATE_PROBLEM(Problem) template void Run::solve(const Problem&, MadeOnce*) const;
#define NNORM_INSTANTIATE(T) NNORM_FOR_EACH_PROBLEM(NNORM_INSTANTIATE_PROBLEM, T)
NNORM_FOR_EACH_TYPE(NNORM_INSTANTIATE)
#undef NNORM_INSTANTIATE
#undef NNORM_INSTANTIATE_PROBLEM

}  // namespace nnorm::ort
