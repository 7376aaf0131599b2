// Which kernel takes a tensor of BatchNormalNorm on a GPU with 132 multiprocessors, and which accesses of 16-bit elements
// are within a limit.
#include "batch_normal_norm.cuh"
#include "check.h"
#include "oracle.h"

namespace nnorm_test {
namespace {

using nnorm::BFloat16;
using nnorm::Float16;
using nnorm::cuda::ChannelKernel;
using nnorm::cuda::Elements;
using nnorm::cuda::Guard;
using nnorm::cuda::SameBits;

struct Geometry {
  size_t samples, channels, extent;
};

template <class T>
void expect(ChannelKernel kernel, Geometry g, size_t lead = 0, bool alike = true) {
  nnorm::ChannelProblem<T> problem{};
  problem.samples = g.samples;
  problem.channels = g.channels;
  problem.extent = g.extent;
  for (const bool residual : {false, true}) {
    const ChannelKernel chosen = residual ? nnorm::cuda::kernel_for<true>(problem, lead, alike, 132)
                                          : nnorm::cuda::kernel_for<false>(problem, lead, alike, 132);
    CHECK(chosen == kernel, "[%zu, %zu, %zu] of %zu bytes, %zu off a boundary: kernel %d", g.samples, g.channels, g.extent,
          sizeof(T), lead, int(chosen));
  }
}

// What the H200 was fastest with, and what other kernels cannot take.
template <class T>
void test_choice() {
  constexpr bool is_double = sizeof(T) == 8;
  expect<T>(ChannelKernel::large_tiles, {64, 256, 3136});
  expect<T>(ChannelKernel::small_tiles, {1, 64, 3136});
  expect<T>(is_double ? ChannelKernel::large_tiles : ChannelKernel::small_tiles, {8, 128, 784});
  expect<T>(is_double ? ChannelKernel::rows : ChannelKernel::crossing_elements, {1, 512, 49});
  expect<T>(is_double ? ChannelKernel::rows_of_elements : ChannelKernel::crossing_elements, {1, 512, 49}, 1, false);
  expect<T>(sizeof(T) == 2 ? ChannelKernel::crossing_elements : ChannelKernel::small_tiles, {1, 256, 196});
  expect<T>(is_double ? ChannelKernel::columns : ChannelKernel::crossing_elements, {1, 1000, 1});
  expect<T>(is_double ? ChannelKernel::columns : ChannelKernel::crossing, {8, 2048, 49});
  expect<T>(ChannelKernel::columns_of_elements, {8, 2048, 49}, 1);
  expect<T>(ChannelKernel::columns_of_elements, {8, 2048, 49}, 0, false);
  expect<T>(ChannelKernel::columns, {256, 512, 49});
  expect<T>(ChannelKernel::columns, {8192, 4096, 1});
  expect<T>(ChannelKernel::rows, {64, 64, 3001});
  expect<T>(ChannelKernel::rows_of_elements, {64, 64, 3001}, 0, false);
  expect<T>(ChannelKernel::columns, {size_t(1) << 20, 1024, 49});            // more elements than 2^31
  expect<T>(ChannelKernel::rows, {40, size_t(1) << 28, 9});                  // more positions than 2^31
  expect<T>(ChannelKernel::rows, {size_t(1) << 20, 1024, size_t(1) << 12});  // more accesses than 2^31
}

template <class T>
void test_limit(float limit) {
  const Guard guard = Guard::of<T>(limit);
  constexpr int width = 8;
  size_t wrong = 0;
  for (uint32_t bits = 0; bits < 1u << 16; ++bits)
    for (int j = 0; j < width; ++j) {
      Elements<T, width> x{};
      x.pairs[j / 2] = bits << (j % 2 ? 16 : 0);
      T rounded, element{uint16_t(bits)};
      nnorm::narrow(std::fmin(limit, std::is_same_v<T, Float16> ? 65504.0f : 0x1.fep127f), rounded);
      const bool expected = limit >= 0 && std::fabs(nnorm::widened(element)) <= nnorm::widened(rounded);
      wrong += nnorm::cuda::are_within(x, guard) != expected;
    }
  CHECK(wrong == 0, "limit %g: %zu wrong decisions", double(limit), wrong);
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  test_choice<float>();
  test_choice<double>();
  test_choice<Float16>();
  test_choice<BFloat16>();
  test_choice<SameBits<Float16>>();
  for (const float limit : {-1.0f, 0.0f, 1e-7f, 0.75f, 1.0f, 30000.0f, 65504.0f, 1e30f, 3.4e38f, INFINITY}) {
    test_limit<Float16>(limit);
    test_limit<BFloat16>(limit);
  }
  return finish();
}
