// The CPU kernels on tensors of more than 2^32 elements, of which only the last items are computed, so that only the last
// pages take memory.
#include "address_space.h"
#include "buffers.h"
#include "check.h"
#include "mathematics_table.h"
#include "oracle.h"

namespace nnorm_test {
namespace {

using nnorm::Float16;
using nnorm::Sharing;

// With λ = 1, y is x + bias. The bias of a channel is its index.
void test_batch_normal_norm(const AvailableInstructionSet& set, Sharing sharing, size_t row_length, size_t period) {
  const AddressSpace memory;
  const size_t lanes = 16, channels = sharing == Sharing::row    ? period
                                      : sharing == Sharing::lane ? period * lanes
                                                                 : row_length;
  const std::vector<float> ones(channels, 1), zeros(channels, 0);
  std::vector<float> bias(channels), table(size_t(nnorm::ChannelField::count) * channels);
  for (size_t c = 0; c < channels; ++c) bias[c] = float(c);
  const float* parameters[] = {ones.data(), zeros.data(), ones.data(), ones.data(), ones.data(), bias.data()};
  set.kernels->float16.prepare_channels(parameters, channels, 1, table.data());

  nnorm::ChannelWork<Float16> work{};
  work.x = work.y = memory.data();
  work.table = table.data();
  work.table_width = channels;
  work.size = size / row_length * row_length;
  work.row_length = row_length;
  work.period = period;
  work.lanes = lanes;
  work.sharing = sharing;
  const size_t items = nnorm::count_items(work), first = (items - 2) * nnorm::elements_per_item;
  CHECK(items == work.size / nnorm::elements_per_item + (work.size % nnorm::elements_per_item != 0), "%zu items",
        items);
  fill(memory.data(), first, work.size);
  set.kernels->float16.batch_normal_norm(work, items - 2, items);
  for (size_t i = first; i < work.size; ++i) {
    const size_t row = i / row_length, position = i % row_length;
    const size_t channel = sharing == Sharing::row    ? row % period
                           : sharing == Sharing::lane ? row % period * lanes + position % lanes
                                                      : position;
    const double expected = number_at(i) + double(channel), result = double(nnorm::widened(memory.data()[i]));
    CHECK(std::fabs(result - expected) < 0.05, "%s, sharing %d: y[%zu] = %g, should be %g", set.name, int(sharing),
          i, result, expected);
  }
  CHECK(all_zero(memory.data(), first - beyond, first) && all_zero(memory.data(), work.size, size + beyond),
        "%s, sharing %d: written outside the items", set.name, int(sharing));
}

// The last rows must be equal to those of a problem that has only these rows.
void test_layer_group_normal_norm(const AvailableInstructionSet& set, size_t row_length, size_t run) {
  const AddressSpace memory;
  const size_t period = 3, weights = row_length / run, rows = size / row_length;
  std::vector<float> weight(period * weights), bias(period * weights);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = float(1 + i % 5), bias[i] = float(i % 7);
  nnorm::RowProblem<Float16> work{memory.data(), memory.data(), weight.data(), bias.data(), rows,
                              row_length,    period,        run,           1e-5,        3e-3};
  const size_t items = nnorm::count_items(work), first_row = (items - 2) * nnorm::rows_per_item(work),
               first = first_row * row_length;
  fill(memory.data(), first, rows * row_length);
  set.kernels->float16.layer_group_normal_norm(work, items - 2, items);
  for (size_t row = first_row; row < rows; ++row) {
    std::vector<Float16> alone(row_length);
    for (size_t i = 0; i < row_length; ++i) nnorm::narrow(float(number_at(row * row_length + i)), alone[i]);
    const size_t at = row % period * weights;
    const nnorm::RowProblem<Float16> one{alone.data(), alone.data(), &weight[at], &bias[at], 1, row_length, 1,
                                     run,          1e-5,         3e-3};
    set.kernels->float16.layer_group_normal_norm(one, 0, nnorm::count_items(one));
    CHECK(std::memcmp(alone.data(), memory.data() + row * row_length, row_length * sizeof(Float16)) == 0,
          "%s: row %zu of length %zu", set.name, row, row_length);
  }
  CHECK(all_zero(memory.data(), first - beyond, first) && all_zero(memory.data(), rows * row_length, size + beyond),
        "%s: written outside the items", set.name);
}

}  // namespace
}  // namespace nnorm_test

int main() {
  using namespace nnorm_test;
  if (!AddressSpace().data()) {
    std::printf("skipped: %zu elements of address space are not to be had here\n", size);
    return skipped;
  }
  for (const AvailableInstructionSet& set : available_instruction_sets()) {
    test_batch_normal_norm(set, Sharing::row, 1001, 7);
    test_batch_normal_norm(set, Sharing::row, size, 1);
    test_batch_normal_norm(set, Sharing::element, 48, 1);
    test_batch_normal_norm(set, Sharing::lane, 16 * 63, 3);
    test_layer_group_normal_norm(set, 768, 1);
    test_layer_group_normal_norm(set, 4099, 1);
    test_layer_group_normal_norm(set, 8190, 9);
  }
  return finish();
}
