// See reference.h. This file is compiled with -ffast-math, so that compilers use vector functions; all numbers here are
// finite.
#include "reference.h"

#include <cmath>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
#define NNORM_FOR_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define NNORM_FOR_VECTORS
#endif

namespace nnorm_test {

NNORM_FOR_VECTORS void logarithms_of(const float* h, size_t n, double* log) {
  for (size_t i = 0; i < n; ++i) log[i] = std::log1p(double(h[i]));
}

NNORM_FOR_VECTORS void psi_of_logarithms(const double* log, size_t n, double eta, double* psi) {
  if (eta == 0)
    for (size_t i = 0; i < n; ++i) psi[i] = log[i];
  else
    for (size_t i = 0; i < n; ++i) psi[i] = std::expm1(eta * log[i]) / eta;
}

}  // namespace nnorm_test
