// Calls the kernels under valgrind, which counts their instructions (make bench-check). Every case is one call by a
// function of its own, and one line of output with its name and the number of elements.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>

#include "channels.h"
#include "nnorm/quantized.h"
#include "rows.h"

namespace nnorm_test {

// callgrind reports the instructions of each of these functions by its name.
template <size_t number>
__attribute__((noinline)) void measured(const std::function<void()>& kernel) {
  asm volatile("" ::"i"(number));  // else compilers merge equal functions
  kernel();
}

namespace {

template <size_t... numbers>
void call_measured(size_t number, const std::function<void()>& kernel, std::index_sequence<numbers...>) {
  constexpr void (*all[])(const std::function<void()>&) = {measured<numbers>...};
  all[number](kernel);
}

using nnorm::Sharing;
using nnorm::InstructionSet;

constexpr size_t elements = 3 * 64 * 56 * 56 / 4;

void measure(const InstructionSet& set, const std::string& name, size_t n, const std::function<void()>& kernel) {
  constexpr size_t most = 100;
  static size_t number = 0;
  if (number == most) std::abort();
  std::printf("%s %s|%zu\n", set.name, name.c_str(), n);
  call_measured(number++, kernel, std::make_index_sequence<most>());
}

template <class T>
void channels_cases(const InstructionSet& set, const char* type) {
  Random random(1);
  const size_t channels = 64, extent = elements / channels;
  const ChannelParameters<Arithmetic<T>> p(channels, random);
  std::vector<double> numbers(elements);
  for (double& value : numbers) value = random.normal();
  const std::vector<T> x = to_type<T>(numbers);
  std::vector<T> y(elements);
  std::vector<Arithmetic<T>> table(size_t(nnorm::ChannelField::count) * channels);
  const nnorm::KernelTable<T>& kernels = set.table<T>();
  kernels.prepare_channels(p.pointers().data(), channels, 1, table.data());
  nnorm::ChannelWork<T> work{};
  work.x = work.residual = x.data(), work.y = y.data(), work.table = table.data();
  work.table_width = channels, work.size = elements;
  const auto run = [&] { kernels.batch_normal_norm(work, 0, nnorm::count_items(work)); };
  for (const EpilogueFacts& facts : nnorm::epilogues) {
    work.epilogue = facts.epilogue, work.sharing = Sharing::row, work.row_length = extent, work.period = channels;
    measure(set, std::string(facts.operator_name) + " " + type, elements, run);
  }
  work.epilogue = Epilogue::none, work.sharing = Sharing::element, work.row_length = channels, work.period = 1;
  measure(set, std::string("BatchNormalNorm, channels last, ") + type, elements, run);
}

template <class T>
void rows_cases(const InstructionSet& set, const char* type) {
  for (const size_t length : {64, 768, 12544}) {
    Random random(2);
    // Rows of LayerNormalNorm; the longest is a group of GroupNormalNorm.
    const size_t rows = elements / length, run = length > 1000 ? 784 : 1, n = rows * length;
    std::vector<double> numbers(n);
    for (double& value : numbers) value = random.normal();
    const Rows<T> problem({rows, length, run == 1 ? 1 : rows, run}, numbers, random);
    std::vector<T> y(n);
    const RowProblem<T> work = problem.work(problem.x.data(), y.data());
    const char* name = run == 1 ? "LayerNormalNorm" : "GroupNormalNorm";
    measure(set, std::string(name) + " of " + std::to_string(length) + " " + type, n,
            [&] { set.table<T>().layer_group_normal_norm(work, 0, nnorm::count_items(work)); });
  }
}

void quantized_cases(const InstructionSet& set) {
  Random random(3);
  const size_t channels = 64;
  std::vector<uint8_t> x(elements), y(elements), bytes(channels * nnorm::table_entries);
  std::vector<float> steps(bytes.size());
  for (uint8_t& value : x) value = uint8_t(random.below(256));
  nnorm::QuantizedWork work{};
  work.x = work.residual = x.data(), work.y = y.data(), work.bytes = bytes.data(), work.steps = steps.data();
  work.sum = {0, 128, 0.5f, -128, 127, 128}, work.channels = channels;
  for (const bool is_last : {false, true})
    for (const bool is_sum : {false, true}) {
      work.extent = is_last ? 1 : elements / channels, work.samples = is_last ? elements / channels : 1;
      measure(set, std::string("Quantized") + (is_sum ? "BatchNormalNormAddRelu" : "BatchNormalNorm") +
                          (is_last ? ", channels last" : ""),
              elements, [&] { (is_sum ? set.quantized.sum : set.quantized.table)(work, 0, nnorm::count_items(work)); });
    }
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
#if defined(__clang__)
  std::printf("compiler clang %s\n", __clang_version__);
#else
  std::printf("compiler gcc %s\n", __VERSION__);
#endif
  for (const InstructionSet* const* next = nnorm::instruction_sets(); *next != nullptr; ++next) {
    channels_cases<float>(**next, "float32");
    channels_cases<nnorm::Float16>(**next, "float16");
    channels_cases<nnorm::BFloat16>(**next, "bfloat16");
    channels_cases<double>(**next, "float64");
    rows_cases<float>(**next, "float32");
    rows_cases<nnorm::Float16>(**next, "float16");
    quantized_cases(**next);
  }
}
