// The CUDA kernels on tensors of more than 2^32 elements: only the last blocks of each grid run, and only the last pages
// take memory.
#include "address_space.h"
#include "buffers.h"
#include "check.h"
#include "cuda_on_host.h"
#include "nnorm/cuda_kernels.h"

namespace nnorm_test {
namespace {

using nnorm::Float16;

// A device so large that every thread has at most one item of work, so that the last threads compute the end of the
// tensor.
constexpr int many_multiprocessors = 1 << 20;
constexpr size_t tail = 1 << 20;

// Checks that each of the last elements is unchanged or right, and that the final elements are right.
template <class Expected>
void check_end(const AddressSpace& memory, size_t n, const char* name, Expected expected) {
  size_t computed = 0, wrong = 0, last = 0;
  for (size_t i = n - tail; i < n; ++i) {
    const double value = double(nnorm::widened(memory.data()[i]));
    const bool right = std::fabs(value - expected(i)) < 0.02;
    computed += right;
    wrong += !right && value != number_at(i);
    last = right ? last + 1 : 0;
  }
  CHECK(wrong == 0 && last >= 8, "%s: %zu results are wrong, %zu right, the last %zu of them in a row", name, wrong, computed,
        last);
  CHECK(all_zero(memory.data(), n, n + beyond), "%s: written past the end", name);
}

// With λ = 1, y is x + bias. The bias is 100, so that no element is both unchanged and right.
void test_batch_normal_norm(size_t samples, size_t channels, size_t extent, const char* name) {
  const AddressSpace memory;
  const std::vector<float> ones(channels, 1), zeros(channels, 0), bias(channels, 100);
  nnorm::ChannelProblem<Float16> problem{};
  problem.x = problem.y = memory.data();
  const float* parameters[] = {ones.data(), zeros.data(), ones.data(), ones.data(), ones.data(), bias.data()};
  std::copy_n(parameters, 6, problem.parameters);
  problem.samples = samples;
  problem.channels = channels;
  problem.extent = extent;
  const size_t n = problem.size();
  fill(memory.data(), n - tail, n);
  CHECK(n > size_t(1) << 32 && nnorm::cuda::run(problem, nullptr) == cudaSuccess, "%s", name);
  check_end(memory, n, name, [](size_t i) { return number_at(i) + 100; });
}

void test_layer_normal_norm(size_t length, const char* name) {
  const AddressSpace memory;
  const size_t rows = size / length, n = rows * length;
  const std::vector<float> weight(length, 0), bias(length, 100);
  const nnorm::RowProblem<Float16> problem{memory.data(), memory.data(), weight.data(), bias.data(), rows, length, 1, 1, 1e-5, 3e-3};
  fill(memory.data(), n - tail, n);
  CHECK(nnorm::cuda::run(problem, nullptr) == cudaSuccess, "%s", name);
  check_end(memory, n, name, [](size_t) { return 100.0; });
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  if (!AddressSpace().data()) {
    std::printf("skipped: %zu elements of address space are not to be had here\n", size);
    return skipped;
  }
  cuda_on_host::multiprocessors = many_multiprocessors;
  cuda_on_host::last_blocks = 2;
  test_batch_normal_norm(size / 4096 / 3, 3, 4096, "rows of channels");
  test_batch_normal_norm(33 * 131070, 1000, 1, "columns of channels");  // the largest grid computes 131070 rows at once
  test_layer_normal_norm(768, "rows in a warp");
  test_layer_normal_norm(4096, "rows in a block");
  test_layer_normal_norm(4100, "rows in shared memory");
  return finish();
}
