#if defined(__x86_64__)
#include "processor.h"

#include <cpuid.h>

#include <cstring>

namespace nnorm {
namespace {

// Bits of XCR0: the operating system saves these registers when it switches to another thread. Without them the
// registers lose their contents.
constexpr uint32_t saves_avx = 0x6, saves_avx512 = 0xe6;

struct Extension {
  const char* name;
  uint32_t Processor::* word;
  uint32_t bit, saved;
};

const Extension extensions[] = {
    {"fma", &Processor::leaf_1_ecx, bit_FMA, saves_avx},
    {"movbe", &Processor::leaf_1_ecx, bit_MOVBE, 0},
    {"f16c", &Processor::leaf_1_ecx, bit_F16C, saves_avx},
    {"bmi", &Processor::leaf_7_ebx, bit_BMI, 0},
    {"avx2", &Processor::leaf_7_ebx, bit_AVX2, saves_avx},
    {"bmi2", &Processor::leaf_7_ebx, bit_BMI2, 0},
    {"avx512f", &Processor::leaf_7_ebx, bit_AVX512F, saves_avx512},
    {"avx512dq", &Processor::leaf_7_ebx, bit_AVX512DQ, saves_avx512},
    {"avx512cd", &Processor::leaf_7_ebx, bit_AVX512CD, saves_avx512},
    {"avx512bw", &Processor::leaf_7_ebx, bit_AVX512BW, saves_avx512},
    {"avx512vl", &Processor::leaf_7_ebx, bit_AVX512VL, saves_avx512},
    {"avx512vbmi", &Processor::leaf_7_ecx, bit_AVX512VBMI, saves_avx512},
    {"lzcnt", &Processor::extended_leaf_1_ecx, bit_LZCNT, 0},
};

uint32_t saved_registers() {
  uint32_t low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
#if defined(__APPLE__)
  if ((low & saves_avx) == saves_avx) low |= saves_avx512;  // macOS adds these bits when a thread first uses the registers
#endif
  return low;
}

}  // namespace

Processor Processor::current() {
  Processor processor;
  uint32_t eax = 0, ebx = 0, edx = 0;
  __get_cpuid(1, &eax, &ebx, &processor.leaf_1_ecx, &edx);
  __get_cpuid_count(7, 0, &eax, &processor.leaf_7_ebx, &processor.leaf_7_ecx, &edx);
  __get_cpuid(0x80000001, &eax, &ebx, &processor.extended_leaf_1_ecx, &edx);
  if (processor.leaf_1_ecx & bit_OSXSAVE) processor.saved = saved_registers();
  return processor;
}

bool Processor::has(const char* extension) const {
  for (const Extension& known : extensions)
    if (std::strcmp(known.name, extension) == 0) return (this->*known.word & known.bit) != 0 && (~saved & known.saved) == 0;
  return false;
}

bool processor_has(const char* extension) {
  static const Processor processor = Processor::current();
  return processor.has(extension);
}

}  // namespace nnorm
#endif
