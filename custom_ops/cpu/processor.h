// What an x86-64 processor can run, by its own description.
#pragma once

#include <cstdint>

namespace nnorm {

// The words of the instructions cpuid and xgetbv that describe extensions.
struct Processor {
  uint32_t leaf_1_ecx = 0, leaf_7_ebx = 0, leaf_7_ecx = 0, extended_leaf_1_ecx = 0;
  uint32_t saved = 0;  // the registers that the operating system saves: XCR0

  // The one that runs this.
  static Processor current();

  // Whether it has an extension by GCC's name, such as "avx2", and the operating system saves the registers for it.
  bool has(const char* extension) const;
};

// Whether this processor has it. Not __builtin_cpu_supports: in the library of Zig, which compiles the wheels for Linux, that
// answers "no" for every extension, and the kernels for plain processors would run on all.
bool processor_has(const char* extension);

}  // namespace nnorm
