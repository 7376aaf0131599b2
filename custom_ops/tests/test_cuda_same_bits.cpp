// How far the bits of the GPU's sources are from those of the CPU kernels: the sources are compiled for the processor, and
// their results counted that differ. BatchNormalNorm in float32 and float64 has the same definition in both, and the same
// bits. The others differ: other orders of sums, the hardware's logarithm and power for 16 bits (here those of the C library).
#include <cstdlib>

#include "channels.h"
#include "check.h"
#include "nnorm/cuda_kernels.h"
#include "rows.h"

namespace nnorm_test {
namespace {

using nnorm::ChannelProblem;

// Units in the last place of T at 1.
template <class T>
constexpr double epsilon = std::is_same_v<T, double>            ? 0x1p-52
                           : std::is_same_v<T, float>           ? 0x1p-23
                           : std::is_same_v<T, nnorm::Float16> ? 0x1p-10
                                                                : 0x1p-7;

struct Difference {
  size_t values = 0, different = 0;
  double greatest = 0;  // relative to max(1, |y|), in units in the last place

  template <class T>
  void add(const std::vector<T>& cpu, const std::vector<T>& gpu) {
    values += cpu.size();
    for (size_t i = 0; i < cpu.size(); ++i) {
      if (std::memcmp(&cpu[i], &gpu[i], sizeof(T)) == 0) continue;
      ++different;
      const double a = double(nnorm::widened(cpu[i])), b = double(nnorm::widened(gpu[i]));
      greatest = std::max(greatest, std::fabs(a - b) / std::fmax(1, std::fabs(a)) / epsilon<T>);
    }
  }
};

template <class T>
Difference of_channels(size_t values) {
  Random random(31);
  Difference difference;
  while (difference.values < values) {
    const size_t channels = 1 + random.below(40), extent = 1 + random.below(300), samples = 1 + random.below(3);
    const ChannelParameters<Arithmetic<T>> p(channels, random);
    const std::vector<T> x = to_type<T>(normal_numbers(samples * channels * extent, random));
    std::vector<T> cpu(x.size()), gpu(x.size());
    ChannelProblem<T> problem{};
    problem.x = x.data();
    problem.y = gpu.data();
    std::copy_n(p.pointers().begin(), ChannelProblem<T>::parameter_count, problem.parameters);
    problem.samples = samples, problem.channels = channels, problem.extent = extent;
    CHECK(nnorm::cuda::run(problem, nullptr) == cudaSuccess, "%s", NameOf<T>::value);
    const nnorm::KernelTable<T>& kernels = nnorm::best_target().table<T>();
    std::vector<Arithmetic<T>> table(size_t(nnorm::ChannelField::count) * channels);
    kernels.prepare_channels(problem.parameters, channels, 1, table.data());
    nnorm::ChannelWork<T> work{};
    work.x = x.data(), work.y = cpu.data(), work.table = table.data(), work.table_width = work.period = channels;
    work.size = x.size(), work.row_length = extent, work.sharing = nnorm::Sharing::row;
    kernels.batch_normal_norm(work, 0, nnorm::count_items(work));
    difference.add(cpu, gpu);
  }
  return difference;
}

template <class T>
Difference of_rows(size_t values) {
  Random random(32);
  Difference difference;
  for (size_t round = 0; difference.values < values; ++round) {
    const size_t length = 1 + random.below(round % 4 ? 900 : 5000), rows = 1 + random.below(4);
    const Rows<T> problem({rows, length, 1, 1}, normal_numbers(rows * length, random), random);
    std::vector<T> cpu(rows * length), gpu(rows * length);
    const RowProblem<T> on_cpu = problem.work(problem.x.data(), cpu.data()), on_gpu = problem.work(problem.x.data(), gpu.data());
    nnorm::best_target().table<T>().layer_group_normal_norm(on_cpu, 0, nnorm::count_items(on_cpu));
    CHECK(nnorm::cuda::run(on_gpu, nullptr) == cudaSuccess, "%s", NameOf<T>::value);
    difference.add(cpu, gpu);
  }
  return difference;
}

void judge(const char* operators, const char* type, const Difference& d, double most_different, double bound) {
  const double share = double(d.different) / double(d.values);
  std::printf("| %s | %s | %.3f %% of %zu | %.2f |\n", operators, type, 100 * share, d.values, d.greatest);
  CHECK(share <= most_different, "%s %s: %g %% differ", operators, type, 100 * share);
  CHECK(d.greatest <= bound, "%s %s: by %g", operators, type, d.greatest);
}

template <class T>
void test(size_t values, double channels_differ, double rows_differ, double channels_bound, double rows_bound) {
  judge("BatchNormalNorm", NameOf<T>::value, of_channels<T>(values), channels_differ, channels_bound);
  judge("LayerNormalNorm", NameOf<T>::value, of_rows<T>(values), rows_differ, rows_bound);
}

}  // namespace
}  // namespace nnorm_test

int main(int count, char** arguments) {
  using namespace nnorm_test;
  const size_t values = count > 1 ? size_t(std::strtoull(arguments[1], nullptr, 10)) : 200000;
  std::printf("| operator | type | values that differ | greatest difference, units in the last place at max(1, abs(y)) |\n");
  std::printf("| --- | --- | ---: | ---: |\n");
  test<float>(values, 0, 0.5, 0, 30);
  test<double>(values, 0, 0.5, 0, 30);
  test<nnorm::Float16>(values, 1e-3, 1e-3, 1, 1);
  test<nnorm::BFloat16>(values, 5e-4, 5e-4, 1, 1);
  return finish();
}
