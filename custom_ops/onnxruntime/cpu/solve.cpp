// How the CPU execution provider solves the operators' problems: items of a call, spread over the session's threads.
#include "solve.h"

namespace nnorm::ort {
namespace {

// Extents, and runs of elements with one weight, that are shorter than this are no length for a vectorised loop. The
// parameters are then repeated for each element; of channels, where enough samples share them that it pays.
constexpr size_t short_run = 16, enough_samples = 4;

template <class Real>
std::vector<Real> repeated(const Real* values, size_t count, size_t times) {
  std::vector<Real> result;
  result.reserve(count * times);
  for (size_t i = 0; i < count; ++i) result.insert(result.end(), times, values[i]);
  return result;
}

}  // namespace

const char* const execution_provider = "CPUExecutionProvider";

template <class T>
void Run::solve(const ChannelProblem<T>& problem) const {
  const size_t channels = problem.channels, extent = problem.extent;
  const bool each_its_own = extent == 1 || (extent < short_run && problem.samples >= enough_samples);
  const size_t repeat = each_its_own ? extent : 1;
  const std::vector<Arithmetic<T>> table = channel_table(problem, repeat);
  PerChannel<T> work = per_channel(problem, table, channels * repeat);
  work.row_length = each_its_own ? channels * extent : extent;
  work.period = each_its_own ? 1 : channels;
  work.sharing = each_its_own ? Sharing::element : Sharing::row;
  run_items(*this, work, best_target().table<T>().per_channel);
}

template <class T>
void Run::solve(const RowProblem<T>& problem) const {
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
  run_items(*this, work, best_target().table<T>().per_row);
}

#define NNORM_INSTANTIATE(T) \
  template void Run::solve(const ChannelProblem<T>&) const; \
  template void Run::solve(const RowProblem<T>&) const;
NNORM_FOR_EACH_TYPE(NNORM_INSTANTIATE)
#undef NNORM_INSTANTIATE

}  // namespace nnorm::ort
