// Calls the CPU kernels for an operator's problem.
#pragma once

#include "../runtime.h"
#include "nnorm/kernels.h"

namespace nnorm::ort {

template <class Work>
void run_items(const Run& run, const Work& work, void (*kernel)(const Work&, size_t, size_t),
               size_t fewest_to_share = Run::fewest_items_to_share) {
  struct Call {
    const Work& work;
    void (*kernel)(const Work&, size_t, size_t);
  } call{work, kernel};
  run.over_items(count_items(work), &call, [](void* data, size_t item) {
    const Call& call = *static_cast<const Call*>(data);
    call.kernel(call.work, item, item + 1);
  }, fewest_to_share);
}

// The prepared parameters of the channels, each `repeat` times: prepared once, or in `memory` for this run.
template <class T>
const std::vector<Arithmetic<T>>& channel_table(const ChannelProblem<T>& problem, size_t repeat,
                                                MadeOnce* prepared, std::vector<Arithmetic<T>>& memory) {
  using Table = std::vector<Arithmetic<T>>;
  const auto make = [&] {
    Table table(size_t(ChannelField::count) * problem.channels * repeat);
    best_instruction_set().table<T>().prepare_channels(problem.parameters, problem.channels, repeat, table.data());
    return table;
  };
  if (prepared != nullptr && repeat == 1)
    return *prepared->get<Table>([&] { return std::make_shared<const Table>(make()); });
  return memory = make();
}

// The arguments of the kernel without the fields that define which parameters belong to an element.
template <class T>
ChannelWork<T> channel_work(const ChannelProblem<T>& problem, const std::vector<Arithmetic<T>>& table, size_t table_width) {
  ChannelWork<T> work{};
  work.x = problem.x;
  work.residual = problem.residual;
  work.y = problem.y;
  work.table = table.data();
  work.table_width = table_width;
  work.size = problem.size();
  work.epilogue = problem.epilogue;
  return work;
}

}  // namespace nnorm::ort
