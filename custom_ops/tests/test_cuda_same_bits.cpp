// The CUDA kernels give the bits of the CPU kernels, for any bits of x, in any layout, for rows of any length at any
// address. CMake builds this twice: for the CPU (cuda_on_host.h), and with CUDA.
//
//   test_cuda_same_bits [VALUES [TYPE [BatchNormalNorm | LayerNormalNorm]]]
//
// VALUES of each type and operator (default 400000); a long run takes 1000000000.
//
// For 16-bit tensors this holds with `same_bits`. Without it a GPU uses its approximate instructions (the CPU uses
// functions of the C library), and the values that differ are counted.
#include <cstdlib>
#include <memory>
#include <string>

#include "bits.h"
#include "check.h"
#include "cuda_memory.h"
#include "halves.h"

namespace nnorm_test {
namespace {

using nnorm::ChannelProblem;

// The unit in the last place of T at 1.
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

// The greatest number of values that are compared with the device's instructions: enough to estimate a fraction.
constexpr size_t enough_for_a_share = 20000000;

// The device's instructions saturate at other numbers, so they are compared on numbers as networks have them.
Kind kind_of(Halves halves, size_t round) { return halves == Halves::by_device ? Kind::normal : Kind(round % 3); }

struct ChannelSizes {
  size_t samples, channels, extent;
  bool is_last;
};

// On a GPU of 132 multiprocessors each kernel takes one of these, with more blocks than run at once: tiles, crossing,
// columns, columns of elements, rows, channels last. In the tests without a GPU small tensors do so.
std::vector<ChannelSizes> large_channels() {
  if (!on_gpu) return {};
  return {{44, 64, 3136, false}, {70, 60, 49, false},  {400, 60, 49, false},
          {401, 61, 49, false},  {5, 64, 3001, false}, {3, 64, 12544, true}};
}

template <class T>
Difference of_channels(size_t values, Halves halves) {
  const bool same_bits = halves == Halves::same_bits;
  Random random(31);
  Difference difference;
  const std::vector<ChannelSizes> large = large_channels();
  // Each size takes part twice: its channels are in a table, or each block prepares its own.
  for (size_t round = 0; round < 2 * large.size() || difference.values < values; ++round) {
    const bool has_table = round % 2 == 0;
    const auto [samples, channels, extent, is_last] =
        round < 2 * large.size()
            ? large[round / 2]
            : ChannelSizes{1 + random.below(3), 1 + random.below(40), 1 + random.below(300), round / 2 % 2 == 1};
    const ChannelParameters<Arithmetic<T>> p(channels, random);
    const size_t size = samples * channels * extent;
    const std::vector<T> x = numbers<T>(size, kind_of(halves, round), random), residual = numbers<T>(size, kind_of(halves, round / 3), random);
    const Layout rows{Sharing::row, samples, channels, extent, 0}, last{Sharing::element, samples, channels, extent, 0};
    const Layout& layout = is_last ? last : rows;
    const std::vector<T> x_there = layout.from_rows(x), residual_there = layout.from_rows(residual);
    std::vector<Input<Arithmetic<T>>> parameters;
    for (const auto* each : {&p.scale, &p.shift, &p.pos, &p.neg, &p.weight, &p.bias}) parameters.emplace_back(*each, 0);
    std::vector<std::unique_ptr<OnDevice<Arithmetic<T>>>> parameters_on;
    for (auto& each : parameters) parameters_on.push_back(std::make_unique<OnDevice<Arithmetic<T>>>(each));
    for (const EpilogueFacts& facts : nnorm::epilogues) {
      // At unaligned addresses the kernels read elements one by one.
      const size_t offset = round < 2 * large.size() ? 0 : random.below(4);
      const Input<T> from(x_there, offset), added(residual_there, offset);
      Output<T> y(size, offset);
      const OnDevice<T> x_on(from), added_on(added), y_on(y);
      ChannelProblem<T> problem{};
      problem.x = x_on.data();
      problem.residual = facts.takes_residual ? added_on.data() : nullptr;
      problem.y = y_on.data();
      for (size_t i = 0; i < parameters.size(); ++i) problem.parameters[i] = parameters_on[i]->data();
      problem.samples = is_last ? samples * extent : samples, problem.channels = channels, problem.extent = is_last ? 1 : extent;
      problem.epilogue = facts.epilogue;
      Output<char> table(has_table ? nnorm::cuda::table_size(problem) : 0, 0);
      const OnDevice<char> table_on(table);
      cudaError_t error = cudaSuccess;
      if (has_table) error = nnorm::cuda::prepare(problem, table_on.data(), stream(), same_bits);
      const void* const prepared = has_table ? table_on.data() : nullptr;
      if (error == cudaSuccess)
        error = is_last ? nnorm::cuda::run_channels_last(problem, channels, stream(), same_bits, prepared)
                        : nnorm::cuda::run(problem, stream(), same_bits, prepared);
      CHECK(error == cudaSuccess, "%s %s", NameOf<T>::value, facts.operator_name);
      y_on.fetch(y);
      difference.add(batch_normal_norm<T>(nnorm::best_instruction_set(), rows, facts.epilogue, p, x, residual),
                     layout.to_rows(y.values()));
    }
  }
  return difference;
}

// Without a GPU the device gets little shared memory, into which a long row does not fit, and no clusters.
class Room {
 public:
#if defined(NNORM_CUDA_ON_HOST)
  explicit Room(bool little) {
    if (little) cuda_on_host::shared_memory = 50 << 10, cuda_on_host::clusters = 0;
  }
  ~Room() { cuda_on_host::shared_memory = shared_memory_, cuda_on_host::clusters = clusters_; }

 private:
  const int shared_memory_ = cuda_on_host::shared_memory;
  const unsigned clusters_ = cuda_on_host::clusters;
#else
  explicit Room(bool) {}
#endif
};

// On a GPU of 132 multiprocessors these are several rows for each part of a warp, warp, block and cluster that runs at once.
std::vector<RowGeometry> many_rows() {
  if (!on_gpu) return {};
  return {{4000, 768, 1, 1},     {4000, 1280, 2, 1}, {6000, 784, 3, 49},  {300, 8192, 1, 1},  {240, 16392, 1, 1},
          {160, 25088, 5, 3136}, {70, 65544, 1, 1},  {40, 131072, 2, 16}, {40, 131072, 1, 1}, {20001, 64, 1, 1},
          {9001, 196, 2, 49},    {9001, 200, 3, 1},  {9001, 256, 1, 1},   {5001, 384, 1, 1},  {5001, 512, 2, 1},
          {1001, 3072, 1, 1},    {4001, 769, 2, 1},  {1001, 3001, 1, 1}};
}

// Lengths around the limits of the kernels for warps, blocks, clusters and long rows. Some long rows do not fit into
// shared memory.
template <class T>
Difference of_rows(size_t values, Halves halves) {
  Random random(32);
  Difference difference;
  constexpr size_t special[] = {1, 2, 3, 64, 196, 255, 256, 511, 512, 768, 1023, 1024, 1025, 1280, 1536, 3072, 4096, 4097, 5000, 17000, 70000, 140000};
  const std::vector<RowGeometry> many = many_rows();
  for (size_t round = 0; round < many.size() || difference.values < values; ++round) {
    const size_t length = round % 2 ? special[random.below(std::size(special))] : 1 + random.below(1200);
    const size_t rows = 1 + random.below(1 + 4000 / length), period = 1 + random.below(3);
    const size_t run = length % 3 == 0 && random.below(2) ? length / 3 : 1;
    const bool is_many = round < many.size();
    const RowGeometry geometry = is_many ? many[round] : RowGeometry{rows, length, period, run};
    const size_t size = geometry.rows * geometry.row_length, offset = is_many || random.below(4) ? 0 : random.below(4);
    Rows<T> problem(geometry, std::vector<double>(size), random);
    problem.x = numbers<T>(size, kind_of(halves, round), random);
    if (round % 5 == 0) problem.epsilon = random.below(2) ? 0 : 1e-3;
    if (round % 7 == 0) problem.delta = 0;
    const Input<T> x(problem.x, offset);
    Output<T> y(problem.x.size(), offset);
    const OnDevice<T> x_on(x), y_on(y);
    const Input<Arithmetic<T>> weight(problem.weight, 0), bias(problem.bias, 0);
    const OnDevice<Arithmetic<T>> weight_on(weight), bias_on(bias);
    nnorm::RowProblem<T> work = problem.work(x_on.data(), y_on.data());
    work.weight = weight_on.data(), work.bias = bias_on.data();
    const Room room(random.below(2));
    CHECK(nnorm::cuda::run(work, stream(), halves == Halves::same_bits) == cudaSuccess, "%s", NameOf<T>::value);
    y_on.fetch(y);
    difference.add(layer_group_normal_norm(nnorm::best_instruction_set(), problem, problem.x), y.values());
  }
  return difference;
}

void check_difference(const char* operators, const std::string& type, const Difference& d, double most_different) {
  const double share = double(d.different) / double(d.values);
  std::printf("| %s | %s | %zu of %zu | %.3f %% | %.2f |\n", operators, type.c_str(), d.different, d.values, 100 * share, d.greatest);
  CHECK(share <= most_different, "%s %s: %g %% differ", operators, type.c_str(), 100 * share);
  CHECK(d.greatest <= 1, "%s %s: by %g", operators, type.c_str(), d.greatest);
}

template <class T>
void test(size_t values, const Only& only, Halves halves = Halves::same_bits, double most_different = 0) {
  if (halves == Halves::by_device) values = std::min(values, enough_for_a_share);
  if (!only.type_is<T>()) return;
  const std::string name = name_of<T>(halves);
  if (only.channels())
    check_difference("BatchNormalNorm, …Relu, …AddRelu", name, of_channels<T>(values, halves), most_different);
  if (only.rows()) check_difference("LayerNormalNorm, GroupNormalNorm", name, of_rows<T>(values, halves), most_different);
}

}  // namespace
}  // namespace nnorm_test

int main(int count, char** arguments) {
  using namespace nnorm_test;
  if (!have_device()) {
    std::printf("skipped: no GPU that CUDA can use\n");
    return skipped;
  }
  const size_t values = count > 1 ? size_t(std::strtoull(arguments[1], nullptr, 10)) : 400000;
  const Only only{count > 2 ? arguments[2] : "", count > 3 ? arguments[3] : ""};
  std::printf("| operators | type | values that differ | share | greatest difference, units in the last place at max(1, abs(y)) |\n");
  std::printf("| --- | --- | ---: | ---: | ---: |\n");
  test<float>(values, only);
  test<double>(values, only);
  if (have_same_bits_of_halves) {
    test<nnorm::Float16>(values, only);
    test<nnorm::BFloat16>(values, only);
  }
  test<nnorm::Float16>(values, only, Halves::by_device, 1e-3);
  test<nnorm::BFloat16>(values, only, Halves::by_device, 5e-4);
  return finish();
}
