// Compares the kernels of quantized norms with a lookup of one element at a time, for every size and layout, and the
// tables with float64.
#include <cmath>

#include "channels.h"
#include "check.h"
#include "nnorm/quantized.h"

namespace nnorm_test {
namespace {

using nnorm::Activation;
using nnorm::table_entries;

template <class T>
std::vector<T> random_values(size_t n, Random& random, T (*value)(Random&)) {
  std::vector<T> values(n);
  for (T& each : values) each = value(random);
  return values;
}

uint8_t any_byte(Random& random) { return uint8_t(random.below(256)); }
float quarter_steps(Random& random) { return 0.25f * float(int(random.below(4000)) - 2000); }

void test_one(const nnorm::InstructionSet& set, size_t samples, size_t channels, size_t extent, Random& random) {
  const size_t n = samples * channels * extent, offset = random.below(4);
  const Input<uint8_t> x(random_values(n, random, any_byte), offset), r(random_values(n, random, any_byte), offset);
  const Input<uint8_t> bytes(random_values(channels * table_entries, random, any_byte), 0);
  const Input<float> steps(random_values(channels * table_entries, random, quarter_steps), 0);
  nnorm::QuantizedWork work{};
  work.x = x.data(), work.residual = r.data(), work.bytes = bytes.data(), work.steps = steps.data();
  work.sum = {random.below(2) ? 0x80 : 0, 130.0f, 0.5f, random.below(2) ? 0.0f : -20.0f, 100.0f, 20};
  work.samples = samples, work.channels = channels, work.extent = extent;
  for (const bool in_place : {false, true})
    for (const bool is_sum : {false, true}) {
      Output<uint8_t> y(x.storage().empty() ? std::vector<uint8_t>() : std::vector<uint8_t>(x.data(), x.data() + n), offset);
      work.x = in_place ? y.data() : x.data();
      work.y = y.data();
      run_items(is_sum ? set.quantized.sum : set.quantized.table, work, Order(random.below(3)), random);
      size_t wrong = 0;
      for (size_t i = 0; i < n; ++i) {
        const size_t entry = i / extent % channels * table_entries + x.data()[i];
        const float sum = steps.data()[entry] + (float(r.data()[i] ^ work.sum.sign_flip) - work.sum.offset) * work.sum.factor;
        const float clamped = std::fmin(std::fmax(sum, work.sum.least), work.sum.greatest);
        const uint8_t expected = is_sum ? uint8_t(int(std::nearbyint(clamped)) + work.sum.zero_point) : bytes.data()[entry];
        wrong += y.data()[i] != expected;
      }
      CHECK(wrong == 0 && y.guards_hold(), "%s, %s%s of [%zu, %zu, %zu]: %zu of %zu wrong", set.name,
            is_sum ? "sum" : "table", in_place ? " in place" : "", samples, channels, extent, wrong, n);
    }
}

// A map with few samples is shared as well: its tables are most of what is read.
void test_items() {
  const auto items = [](size_t samples, size_t channels) {
    nnorm::QuantizedWork work{};
    work.samples = samples, work.channels = channels, work.extent = 1;
    return nnorm::count_items(work);
  };
  const size_t expected[][3] = {{0, 64, 0},   {1, 3, 1},    {1, 64, 1},   {1, 512, 2},
                                {16, 512, 8}, {64, 256, 4}, {256, 128, 2}, {1024, 64, 4}};
  for (const auto& [samples, channels, count] : expected)
    CHECK(items(samples, channels) == count, "[%zu, %zu]: %zu items", samples, channels, items(samples, channels));
}

void test_kernels() {
  Random random(21);
  for (const nnorm::InstructionSet* const* next = nnorm::instruction_sets(); *next != nullptr; ++next) {
    std::printf("%s %s\n", (*next)->name, (*next)->quantized.extension);
    // Several items: of columns, of samples, of both, and of planes.
    const size_t large[][3] = {{100, 600, 1}, {700, 65, 1}, {9000, 5, 1}, {600, 260, 1}, {2, 3, 20000}};
    for (const auto& shape : large) test_one(**next, shape[0], shape[1], shape[2], random);
    for (const size_t channels : {1, 2, 3, 21, 33, 63, 64, 65, 130})
      for (const size_t extent : {1, 2, 31, 33, 64, 65, 300})
        for (const size_t samples : {0, 1, 7, 8, 16, 17, 32, 33, 63, 65, 130})
          if (channels * extent * samples <= 40000) test_one(**next, samples, channels, extent, random);
  }
}

// The activations, by formulas of their own; see true_epilogue() in channels.h.
template <class Wide>
Wide true_activation(Activation activation, Wide y) {
  switch (activation) {
    case Activation::none:
      return y;
    case Activation::hard_swish:
      return y <= -3 ? Wide(0) : y >= 3 ? y : y * (y + 3) / 6;
    case Activation::swish:
      return y / (1 + std::exp(-y));
  }
  return Wide(INFINITY);
}

// What follows the norm in an operator.
struct Following {
  EpilogueFacts facts;
  Activation activation;
};

std::vector<Following> all_following() {
  std::vector<Following> all;
  for (const EpilogueFacts& facts : nnorm::epilogues) all.push_back({facts, Activation::none});
#define NNORM_FOLLOWING(activation, name, value) all.push_back({{Epilogue::none, #name, false}, Activation::activation});
  NNORM_FOR_EACH_ACTIVATION(NNORM_FOLLOWING)
#undef NNORM_FOLLOWING
  return all;
}

// Compares every entry of a table with the oracle. An entry within 1e-6 of the middle between two steps may be either.
void test_tables() {
  Random random(22);
  size_t ties = 0, seen = 0;
  for (const auto& [facts, activation] : all_following())
    for (int round = 0; round < 16; ++round) {
      const size_t channels = 1 + random.below(9);
      const ChannelParameters<float> p(channels, random);
      nnorm::QuantizedNorm norm{};
      norm.x = {float(random.log_uniform(1e-3, 0.2)), 0, bool(round & 1)};
      norm.y = {float(random.log_uniform(1e-3, 0.2)), 0, bool(round & 2)};
      norm.residual = {float(random.log_uniform(1e-3, 0.2)), 0, bool(round & 4)};
      for (nnorm::Quantization* each : {&norm.x, &norm.y, &norm.residual})
        each->zero_point = each->least() + int32_t(random.below(3) ? random.below(256) : 255 * random.below(2));
      std::copy_n(p.pointers().begin(), 6, norm.parameters);
      norm.channels = channels;
      norm.epilogue = facts.epilogue;
      norm.activation = activation;
      nnorm::QuantizedTable table;
      CHECK(nnorm::scale_refusal(norm).empty() && nnorm::make_table(norm, table) == channels, "%s", facts.operator_name);
      std::vector<float> x(channels * table_entries), zeros(x.size());
      for (size_t i = 0; i < x.size(); ++i) x[i] = float(norm.x.element(i % table_entries) - norm.x.zero_point) * norm.x.scale;
      std::vector<Wider<float>> y, size;
      const EpilogueFacts plain{Epilogue::none, "", false};
      expected([&](size_t i) { return i / table_entries; }, facts.takes_residual ? plain : facts, p, x, zeros, y, size);
      for (size_t i = 0; i < x.size(); ++i) {
        const double step = double(true_activation(activation, y[i])) / double(norm.y.scale);
        ++seen;
        if (facts.takes_residual) {
          CHECK(std::fabs(table.steps[i] - step) <= 1e-6 + 1e-7 * std::fabs(step), "steps %g, %.9g", step, double(table.steps[i]));
          continue;
        }
        if (std::fabs(std::fabs(step - std::floor(step)) - 0.5) <= 1e-6) {
          ++ties;
          continue;
        }
        const double element = std::nearbyint(step) + norm.y.zero_point;
        const double clamped = std::fmin(std::fmax(element, norm.y.least()), norm.y.greatest());
        CHECK(norm.y.element(table.bytes[i]) == clamped, "entry %zu: %d, not %g", i, norm.y.element(table.bytes[i]), element);
      }
      CHECK(facts.takes_residual ? table.bytes.empty() : table.steps.empty(), "%s", facts.operator_name);
      CHECK(uintptr_t(table.bytes.data()) % nnorm::cache_line == 0 && uintptr_t(table.steps.data()) % nnorm::cache_line == 0,
            "%s: not on a boundary", facts.operator_name);
    }
  CHECK(ties * 1000 <= seen, "%zu ties of %zu", ties, seen);
  std::printf("%zu entries, %zu ties\n", seen, ties);
}

void test_refusals() {
  const float one = 1, zero = 0;
  nnorm::QuantizedNorm norm{{0.1f, 0, false}, {0.1f, 0, false}, {}, {&one, &zero, &one, &one, &one, &zero}, 1, Epilogue::none, Activation::none};
  nnorm::QuantizedTable table;
  CHECK(nnorm::scale_refusal(norm).empty() && nnorm::make_table(norm, table) == 1, "a norm that is right");
  for (const float scale : {0.0f, -1.0f, INFINITY, -INFINITY, NAN})
    for (int which = 0; which < 3; ++which) {
      nnorm::QuantizedNorm wrong = norm;
      wrong.epilogue = Epilogue::add_relu;
      wrong.residual.scale = 0.1f;
      (which == 0 ? wrong.x : which == 1 ? wrong.y : wrong.residual).scale = scale;
      const char* names[] = {"x_scale must be", "y_scale must be", "residual_scale must be"};
      CHECK(nnorm::scale_refusal(wrong).find(names[which]) == 0, "%g: %s", double(scale), nnorm::scale_refusal(wrong).c_str());
    }
  const float nan = NAN;
  norm.parameters[5] = &nan;
  CHECK(nnorm::make_table(norm, table) == 0, "a bias of NaN");
  norm.channels = 0;
  CHECK(nnorm::make_table(norm, table) == 0 && table.bytes.empty(), "no channels");
}

}  // namespace
}  // namespace nnorm_test

int main() {
  nnorm_test::test_items();
  nnorm_test::test_kernels();
  nnorm_test::test_tables();
  nnorm_test::test_refusals();
  return nnorm_test::finish();
}
