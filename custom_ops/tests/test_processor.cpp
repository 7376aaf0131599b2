// Compares the extensions of this processor with the compiler's answers, and tests descriptions of other processors.
#include "check.h"

#if defined(__x86_64__)
#include <set>
#include <string>

#include "processor.h"

namespace nnorm_test {
namespace {

using nnorm::Processor;

const std::set<std::string> with_general_registers{"movbe", "bmi", "bmi2", "lzcnt"};
const std::set<std::string> with_256_bits{"fma", "f16c", "avx2"};
const std::set<std::string> with_512_bits{"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl", "avx512vbmi"};

std::string extensions_of(const Processor& processor) {
  std::string names;
  for (const auto* group : {&with_general_registers, &with_256_bits, &with_512_bits})
    for (const std::string& name : *group)
      if (processor.has(name.c_str())) names += name + " ";
  return names;
}

std::string joined(const std::set<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += name + " ";
  return all;
}

void check(const Processor& processor, const std::string& expected) {
  const std::string found = extensions_of(processor);
  CHECK(found == expected, "'%s', not '%s'", found.c_str(), expected.c_str());
}

void test_this_processor() {
  // The builtin function takes only literals.
#define NNORM_CHECK_EXTENSION(name) \
  CHECK(nnorm::processor_has(name) == bool(__builtin_cpu_supports(name)), "%s: %d", name, nnorm::processor_has(name))
  NNORM_CHECK_EXTENSION("movbe");
  NNORM_CHECK_EXTENSION("bmi");
  NNORM_CHECK_EXTENSION("bmi2");
  NNORM_CHECK_EXTENSION("lzcnt");
  NNORM_CHECK_EXTENSION("fma");
  NNORM_CHECK_EXTENSION("f16c");
  NNORM_CHECK_EXTENSION("avx2");
  NNORM_CHECK_EXTENSION("avx512f");
  NNORM_CHECK_EXTENSION("avx512dq");
  NNORM_CHECK_EXTENSION("avx512cd");
  NNORM_CHECK_EXTENSION("avx512bw");
  NNORM_CHECK_EXTENSION("avx512vl");
  NNORM_CHECK_EXTENSION("avx512vbmi");
#undef NNORM_CHECK_EXTENSION
  CHECK(!nnorm::processor_has("no such extension"), "has it");
}

// The bits are those of Intel's and AMD's manuals.
struct Bit {
  uint32_t Processor::* word;
  int number;
  const char* name;
};

const Bit bits[] = {{&Processor::leaf_1_ecx, 12, "fma"},       {&Processor::leaf_1_ecx, 22, "movbe"},
                    {&Processor::leaf_1_ecx, 29, "f16c"},      {&Processor::leaf_7_ebx, 3, "bmi"},
                    {&Processor::leaf_7_ebx, 5, "avx2"},       {&Processor::leaf_7_ebx, 8, "bmi2"},
                    {&Processor::leaf_7_ebx, 16, "avx512f"},   {&Processor::leaf_7_ebx, 17, "avx512dq"},
                    {&Processor::leaf_7_ebx, 28, "avx512cd"},  {&Processor::leaf_7_ebx, 30, "avx512bw"},
                    {&Processor::leaf_7_ebx, 31, "avx512vl"},  {&Processor::leaf_7_ecx, 1, "avx512vbmi"},
                    {&Processor::extended_leaf_1_ecx, 5, "lzcnt"}};

void test_each_bit() {
  for (const Bit& bit : bits) {
    Processor processor;
    processor.saved = 0xe7;
    check(processor, "");
    processor.*bit.word = 1u << bit.number;
    check(processor, std::string(bit.name) + " ");
  }
}

void test_systems_that_save_a_part() {
  Processor processor;
  for (const Bit& bit : bits) processor.*bit.word |= 1u << bit.number;
  const std::string general = joined(with_general_registers), wide = general + joined(with_256_bits);
  for (const uint32_t saved : {0x0u, 0x3u, 0x5u, 0xe1u}) {  // neither x87 and SSE, nor half of AVX, are enough
    processor.saved = saved;
    check(processor, general);
  }
  for (const uint32_t saved : {0x7u, 0x27u, 0x67u, 0xc7u}) {  // AVX, and parts of AVX-512
    processor.saved = saved;
    check(processor, wide);
  }
  processor.saved = 0xe7;
  check(processor, wide + joined(with_512_bits));
}

}  // namespace
}  // namespace nnorm_test

int main() {
  nnorm_test::test_this_processor();
  nnorm_test::test_each_bit();
  nnorm_test::test_systems_that_save_a_part();
  return nnorm_test::finish();
}
#else
int main() { return nnorm_test::skipped; }
#endif
