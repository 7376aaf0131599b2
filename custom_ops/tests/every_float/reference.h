// Reference results for whole blocks of numbers, by the C library's vector functions. The error, including that of the
// product η·log, is below 2e-14, a millionth of a unit in the last place of float.
#pragma once

#include <cstddef>

namespace nnorm_test {

void logarithms_of(const float* h, size_t n, double* log);                     // log(1 + h) for h ≥ 0
void psi_of_logarithms(const double* log, size_t n, double eta, double* psi);  // (exp(η·log) − 1)/η, and log for η = 0

}  // namespace nnorm_test
