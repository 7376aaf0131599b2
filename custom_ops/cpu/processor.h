// The extensions of an x86-64 processor, as it describes them itself.
#pragma once

#include <cstdint>

namespace nnorm {

// The words of the instructions cpuid and xgetbv that describe extensions.
struct Processor {
  uint32_t leaf_1_ecx = 0, leaf_7_ebx = 0, leaf_7_ecx = 0, extended_leaf_1_ecx = 0;
  uint32_t saved = 0;  // XCR0: the registers that the operating system saves

  // The processor that runs this function.
  static Processor current();

  // Whether the processor has an extension, by GCC's name such as "avx2", and the operating system saves its registers.
  bool has(const char* extension) const;
};

// Processor::has() of the processor that runs this function. __builtin_cpu_supports is not used: in the library of Zig,
// which compiles the wheels for Linux, it returns false for every extension, so that all processors would run the
// baseline kernels.
bool processor_has(const char* extension);

}  // namespace nnorm
