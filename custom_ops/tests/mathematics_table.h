// The functions of mathematics.h and number_types.h over arrays, compiled once for each instruction set with the flags
// of the kernels, so that fused multiplications and vector instructions are the same.
#pragma once

#include <cstdio>
#include <cstring>
#include <vector>

#include "nnorm/kernels.h"

namespace nnorm_test {

template <class Real>
struct Functions {
  void (*log2_1p_of_mantissa)(const Real* m, size_t n, Real* result);
  void (*exp2_m1_of_fraction)(const Real* f, size_t n, Real* result);
  void (*log2_1p)(const Real* h, size_t n, Real* integer, Real* fraction);  // of 1 + magnitude(h)
  void (*exp2_m1)(const Real* integer, const Real* fraction, const Real* eta, size_t n, Real* result);
  void (*bounded_exp2_m1)(const Real* integer, const Real* fraction, const Real* eta, size_t n, Real* result);
  void (*branch)(const Real* eta, const Real* weight, const Real* sign, size_t n, Real* usable, Real* gain);
  void (*add_lmbda_terms)(const Real* h, const Real* integer, const Real* fraction, size_t n, Real* signed_log,
                          Real* h_d, Real* d, Real* curvature);
};

template <class T>
struct ForType {
  void (*widened)(const T* values, size_t n, nnorm::Arithmetic<T>* result);
  void (*narrow)(const nnorm::Arithmetic<T>* values, size_t n, T* result);
  double (*lmbda_of_row)(const nnorm::RowProblem<T>& work, size_t row);  // runs the row and returns its λ̂
};

struct MathematicsTable {
  Functions<float> float32;
  Functions<double> float64;
  ForType<float> of_float;
  ForType<double> of_double;
  ForType<nnorm::Float16> of_float16;
  ForType<nnorm::BFloat16> of_bfloat16;
  double (*estimate_lmbda)(double signed_log, double h_d, double d, double curvature, double n, double delta);
  void (*resolve_exponents)(double lmbda, double delta, double* pos, double* neg);

  const Functions<float>& functions(float) const { return float32; }
  const Functions<double>& functions(double) const { return float64; }
  const ForType<float>& of(float) const { return of_float; }
  const ForType<double>& of(double) const { return of_double; }
  const ForType<nnorm::Float16>& of(nnorm::Float16) const { return of_float16; }
  const ForType<nnorm::BFloat16>& of(nnorm::BFloat16) const { return of_bfloat16; }
};

const MathematicsTable* mathematics_for_avx512_test();
const MathematicsTable* mathematics_for_avx2_test();
const MathematicsTable* mathematics_for_neon_test();
const MathematicsTable* mathematics_for_baseline_test();

struct AvailableInstructionSet {
  const char* name;
  const nnorm::InstructionSet* kernels;
  const MathematicsTable* mathematics;
};

// The instruction sets that were built and that this machine can run; prints which of them it cannot run.
inline std::vector<AvailableInstructionSet> available_instruction_sets() {
  struct Built {
    const char* name;
    const MathematicsTable* (*mathematics)();
  };
  const auto find = [](const char* name) {
    const nnorm::InstructionSet* const* next = nnorm::instruction_sets();
    while (*next && std::strcmp((*next)->name, name) != 0) ++next;
    return *next;
  };
  const Built all_built[] = {
#if defined(NNORM_HAVE_AVX512)
      {"avx512", &mathematics_for_avx512_test},
#endif
#if defined(NNORM_HAVE_AVX2)
      {"avx2", &mathematics_for_avx2_test},
#endif
#if defined(NNORM_HAVE_NEON)
      {"neon", &mathematics_for_neon_test},
#endif
#if defined(NNORM_HAVE_BASELINE)
      {"baseline", &mathematics_for_baseline_test},
#endif
  };
  std::vector<AvailableInstructionSet> result;
  for (const Built& built : all_built) {
    if (const nnorm::InstructionSet* set = find(built.name))
      result.push_back({built.name, set, built.mathematics()});
    else
      std::printf("%s is skipped: this machine lacks it\n", built.name);
  }
  return result;
}

}  // namespace nnorm_test
