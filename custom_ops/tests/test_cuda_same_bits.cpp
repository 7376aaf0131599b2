// One answer on processors and GPUs: the GPU's sources, compiled for the processor, give the bits of the CPU kernels in
// float32 and float64, for any bits of x, in any layout, for rows of any length at any address.
//
//   test_cuda_same_bits [VALUES]    of each type and operator (default 400000); a long run takes 1000000000
//
// In 16 bits a GPU uses its instructions for logarithms and powers (here the C library's functions): there the values that
// differ are counted.
#include <cstdlib>

#include "bits.h"
#include "check.h"
#include "nnorm/cuda_kernels.h"

namespace nnorm_test {
namespace {

using nnorm::ChannelProblem;

template <class T>
constexpr bool narrow_type = sizeof(T) == 2;

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
      if (!differ(cpu[i], gpu[i])) continue;
      ++different;
      const double a = double(nnorm::widened(cpu[i])), b = double(nnorm::widened(gpu[i]));
      greatest = std::max(greatest, std::fabs(a - b) / std::fmax(1, std::fabs(a)) / epsilon<T>);
    }
  }
};

// 16 bits saturate elsewhere on a GPU, so they are compared where networks have them.
template <class T>
Kind kind_of(size_t round) {
  return narrow_type<T> ? Kind::normal : Kind(round % 3);
}

template <class T>
Difference of_channels(size_t values) {
  Random random(31);
  Difference difference;
  for (size_t round = 0; difference.values < values; ++round) {
    const size_t channels = 1 + random.below(40), extent = 1 + random.below(300), samples = 1 + random.below(3);
    const ChannelParameters<Arithmetic<T>> p(channels, random);
    const size_t size = samples * channels * extent;
    const std::vector<T> x = numbers<T>(size, kind_of<T>(round), random), residual = numbers<T>(size, kind_of<T>(round / 3), random);
    const Layout rows{Sharing::row, samples, channels, extent, 0}, last{Sharing::element, samples, channels, extent, 0};
    const bool is_last = round % 2;
    const Layout& layout = is_last ? last : rows;
    const std::vector<T> x_there = layout.from_rows(x), residual_there = layout.from_rows(residual);
    for (const EpilogueFacts& facts : nnorm::epilogues) {
      // Off a boundary the kernels read the elements one by one.
      const size_t offset = random.below(4);
      const Input<T> from(x_there, offset), added(residual_there, offset);
      Output<T> y(size, offset);
      ChannelProblem<T> problem{};
      problem.x = from.data();
      problem.residual = facts.takes_residual ? added.data() : nullptr;
      problem.y = y.data();
      std::copy_n(p.pointers().begin(), ChannelProblem<T>::parameter_count, problem.parameters);
      problem.samples = is_last ? samples * extent : samples, problem.channels = channels, problem.extent = is_last ? 1 : extent;
      problem.epilogue = facts.epilogue;
      const cudaError_t error = is_last ? nnorm::cuda::run_channels_last(problem, channels, nullptr)
                                        : nnorm::cuda::run(problem, nullptr);
      CHECK(error == cudaSuccess, "%s %s", NameOf<T>::value, facts.operator_name);
      difference.add(batch_normal_norm<T>(nnorm::best_target(), rows, facts.epilogue, p, x, residual), layout.to_rows(y.values()));
    }
  }
  return difference;
}

// Lengths about those of the warp's, the block's and the long rows' kernels; of the latter some have no room in shared memory.
template <class T>
Difference of_rows(size_t values) {
  Random random(32);
  Difference difference;
  const int room = cuda_on_host::shared_memory;
  constexpr size_t special[] = {1, 2, 3, 64, 196, 255, 256, 511, 512, 768, 1023, 1024, 1025, 3072, 4096, 4097, 5000, 17000, 70000};
  for (size_t round = 0; difference.values < values; ++round) {
    const size_t length = round % 2 ? special[random.below(std::size(special))] : 1 + random.below(1200);
    const size_t rows = 1 + random.below(1 + 4000 / length), period = 1 + random.below(3), offset = random.below(4) ? 0 : random.below(4);
    const size_t run = length % 3 == 0 && random.below(2) ? length / 3 : 1;
    Rows<T> problem({rows, length, period, run}, std::vector<double>(rows * length), random);
    problem.x = numbers<T>(rows * length, kind_of<T>(round), random);
    if (round % 5 == 0) problem.epsilon = random.below(2) ? 0 : 1e-3;
    if (round % 7 == 0) problem.delta = 0;
    const Input<T> x(problem.x, offset);
    Output<T> y(problem.x.size(), offset);
    cuda_on_host::shared_memory = random.below(2) ? room : 16 << 10;
    CHECK(nnorm::cuda::run(problem.work(x.data(), y.data()), nullptr) == cudaSuccess, "%s", NameOf<T>::value);
    difference.add(layer_group_normal_norm(nnorm::best_target(), problem, problem.x), y.values());
  }
  cuda_on_host::shared_memory = room;
  return difference;
}

void judge(const char* operators, const char* type, const Difference& d, double most_different) {
  const double share = double(d.different) / double(d.values);
  std::printf("| %s | %s | %zu of %zu | %.3f %% | %.2f |\n", operators, type, d.different, d.values, 100 * share, d.greatest);
  CHECK(share <= most_different, "%s %s: %g %% differ", operators, type, 100 * share);
  CHECK(d.greatest <= 1, "%s %s: by %g", operators, type, d.greatest);
}

template <class T>
void test(size_t values, double most_different) {
  judge("BatchNormalNorm, …Relu, …AddRelu", NameOf<T>::value, of_channels<T>(values), most_different);
  judge("LayerNormalNorm, GroupNormalNorm", NameOf<T>::value, of_rows<T>(values), most_different);
}

}  // namespace
}  // namespace nnorm_test

int main(int count, char** arguments) {
  using namespace nnorm_test;
  const size_t values = count > 1 ? size_t(std::strtoull(arguments[1], nullptr, 10)) : 400000;
  std::printf("| operators | type | values that differ | share | greatest difference, units in the last place at max(1, abs(y)) |\n");
  std::printf("| --- | --- | ---: | ---: | ---: |\n");
  test<float>(values, 0);
  test<double>(values, 0);
  test<nnorm::Float16>(values, 1e-3);
  test<nnorm::BFloat16>(values, 5e-4);
  return finish();
}
