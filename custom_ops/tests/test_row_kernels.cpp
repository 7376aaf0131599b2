// How many blocks, warps and threads compute rows of LayerNormalNorm and GroupNormalNorm on a GPU.
#include <numeric>

#include "check.h"
#include "layer_group_normal_norm.cuh"

namespace nnorm_test {
namespace {

using nnorm::cuda::ClusterShape;

// An H200 was fastest with the shapes for 25, 32 and 64 tiles, or as fast as with another. A multiprocessor holds 16 warps:
// for 17 tiles, five blocks of 3 warps are more rows than two of 6.
void test_known_shapes() {
  const struct {
    size_t tiles;
    ClusterShape shape;
  } expected[] = {{17, {6, 3}}, {25, {5, 5}}, {32, {4, 8}}, {64, {8, 8}}, {65, {8, 9}}, {128, {8, 16}}};
  for (const auto& [tiles, shape] : expected) {
    const ClusterShape found = nnorm::cuda::shape_of_cluster(tiles);
    CHECK(found.blocks == shape.blocks && found.warps == shape.warps, "%zu tiles: %u blocks of %u warps", tiles, found.blocks,
          found.warps);
  }
}

void test_shapes_hold_the_row() {
  for (size_t tiles = nnorm::row_chains + 1; tiles <= nnorm::cuda::tiles_of_cluster; ++tiles) {
    const auto [blocks, warps] = nnorm::cuda::shape_of_cluster(tiles);
    const unsigned most = tiles <= 64 ? 8 : unsigned(nnorm::row_chains);
    CHECK(blocks >= 2 && blocks <= nnorm::cuda::most_blocks_of_cluster && warps <= most && blocks * warps >= tiles &&
              (blocks - 1) * warps < tiles,
          "%zu tiles: %u blocks of %u warps", tiles, blocks, warps);
  }
}

// A team keeps its table from row to row if there are enough teams for all rows of the period.
void test_blocks_with_tables() {
  for (const size_t rows : {1, 7, 100, 5000})
    for (const size_t period : {1, 3, 32, 1000})
      for (const size_t teams : {1, 4, 16})
        for (const unsigned most : {1u, 8u, 528u}) {
          nnorm::cuda::Rows<float> work{nullptr, nullptr, nullptr, nullptr, rows, period, 1, 1, nnorm::cuda::Divisor(1), false,
                                        0, 0, 1, 1, 1};
          const unsigned blocks = nnorm::cuda::blocks_with_tables(work, teams, most);
          const bool one_row = blocks * teams >= rows, kept = blocks * teams % period == 0;
          const bool few = most < period / std::gcd(period, teams);
          CHECK(blocks >= 1 && blocks <= most && (one_row || kept || few), "%zu rows, period %zu, %zu teams, %u blocks: %u", rows,
                period, teams, most, blocks);
        }
}

// On a GPU with 132 multiprocessors, where 4225 teams of 16 threads and 8449 of 8 are more than 16 warps for each.
void test_threads_of_row() {
  using nnorm::Float16;
  using nnorm::cuda::SameBits;
  const auto expect = [](auto of_type, size_t rows, unsigned length, unsigned expected, bool whole = true) {
    using T = decltype(of_type);
    const unsigned threads = whole ? nnorm::cuda::threads_of_row<true, T>(rows, length, 132)
                                   : nnorm::cuda::threads_of_row<false, T>(rows, length, 132);
    CHECK(threads == expected, "%zux%u, elements of %zu bytes: %u threads", rows, length, sizeof(T), threads);
  };
  for (const unsigned length : {1u, 128u, 256u, 384u}) expect(float(), 4225, length, 16), expect(float(), 4224, length, 32);
  for (const unsigned length : {386u, 1024u, 1536u}) expect(float(), 100000, length, 32);
  for (const unsigned length : {1538u, 4096u}) expect(float(), 100000, length, 0);
  for (const unsigned length : {1u, 64u, 256u}) expect(Float16(), 8449, length, 8), expect(Float16(), 8448, length, 32);
  for (const unsigned length : {260u, 512u}) expect(Float16(), 4225, length, 16), expect(Float16(), 4224, length, 32);
  expect(Float16(), 100000, 516, 32);
  expect(double(), 100000, 64, 32);
  expect(SameBits<Float16>(), 4225, 256, 16);
  expect(float(), 100000, 255, 32, false);
  expect(Float16(), 1, 1032, 32), expect(float(), 100000, 1025, 0, false), expect(double(), 1, 1025, 0);
  // A block for each of few rows, of at most 1024 threads for each multiprocessor.
  for (const bool whole : {true, false}) {
    expect(float(), 264, 768, 192, whole), expect(float(), 265, 768, 32, whole);
    expect(float(), 132, 4096, 1024, whole), expect(float(), 133, 4096, 0, whole);
    expect(float(), 264, 2048, 512, whole), expect(float(), 264, 2049, 0, whole), expect(float(), 200, 2560, 0, whole);
    expect(float(), 1, 257, 96, whole), expect(float(), 1, 256, 32, whole), expect(float(), 1, 4098, 0, whole);
    expect(SameBits<Float16>(), 264, 768, 192, whole), expect(Float16(), 1, 768, 32, whole);
  }
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  test_known_shapes();
  test_shapes_hold_the_row();
  test_blocks_with_tables();
  test_threads_of_row();
  return finish();
}
