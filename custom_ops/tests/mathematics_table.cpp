// See mathematics_table.h. CMake compiles this once for each instruction set. NNORM_INSTRUCTION_SET is not the
// library's, because a kernel is included here that must not be linked instead of the library's.

// λ̂ is not an output of the kernel, and a test of a copy of the computation would test only the copy. So the kernel is
// compiled with an estimate_lmbda() that records its result.
#include "nnorm/mathematics.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {
static double recorded_lmbda;
template <class Real>
NNORM_INLINE Real recording_estimate_lmbda(LmbdaSums<Real> mean, Real delta) {
  const Real lmbda = estimate_lmbda(mean, delta);
  recorded_lmbda = double(lmbda);
  return lmbda;
}
}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
#define estimate_lmbda recording_estimate_lmbda
#include "nnorm/row_statistics.h"
#undef estimate_lmbda

#include "layer_group_normal_norm.h"
#include "mathematics_table.h"

#define NNORM_MATHEMATICS_OF(instruction_set) mathematics_for_##instruction_set
#define NNORM_MATHEMATICS(instruction_set) NNORM_MATHEMATICS_OF(instruction_set)

namespace nnorm_test {
namespace {

using namespace nnorm;

template <class Real>
void log2_1p_of_mantissa_each(const Real* m, size_t n, Real* result) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) result[i] = log2_1p_of_mantissa(m[i]);
}

template <class Real>
void exp2_m1_of_fraction_each(const Real* f, size_t n, Real* result) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) result[i] = exp2_m1_of_fraction(f[i]);
}

template <class Real>
void log2_1p_each(const Real* h, size_t n, Real* integer, Real* fraction) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const Log2<Real> log = log2_1p(magnitude(h[i]));
    integer[i] = log.integer;
    fraction[i] = log.fraction;
  }
}

template <bool bounded, class Real>
void exp2_m1_each(const Real* integer, const Real* fraction, const Real* eta, size_t n, Real* result) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) result[i] = exp2_m1<bounded>(Log2<Real>{integer[i], fraction[i]}, eta[i]);
}

template <class Real>
void branch_each(const Real* eta, const Real* weight, const Real* sign, size_t n, Real* usable, Real* gain) {
  for (size_t i = 0; i < n; ++i) {
    const Branch<Real> result = branch(eta[i], weight[i], sign[i]);
    usable[i] = result.eta;
    gain[i] = result.gain;
  }
}

template <class Real>
void add_lmbda_terms_each(const Real* h, const Real* integer, const Real* fraction, size_t n, Real* signed_log,
                          Real* h_d, Real* d, Real* curvature) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i)
    add_lmbda_terms(h[i], std::fabs(h[i]), Log2<Real>{integer[i], fraction[i]}, signed_log[i], h_d[i], d[i],
                    curvature[i]);
}

template <class T>
void widened_each(const T* values, size_t n, Arithmetic<T>* result) {
  widen_tile(values, n, result);
}

template <class T>
void narrow_each(const Arithmetic<T>* values, size_t n, T* result) {
  narrow_tile(values, n, result);
}

template <class T>
double lmbda_of_row(const RowProblem<T>& work, size_t row) {
  RowBuffers<T> buffers;
  run_rows(work, row, 1, buffers);
  return recorded_lmbda;
}

double estimate(double signed_log, double h_d, double d, double curvature, double n, double delta) {
  return estimate_lmbda(LmbdaSums<double>{signed_log / n, h_d / n, d / n, curvature / n}, delta);
}

void resolve(double lmbda, double delta, double* pos, double* neg) {
  const Exponents<double> eta = resolve_exponents(lmbda, delta);
  *pos = eta.pos;
  *neg = eta.neg;
}

template <class Real>
constexpr Functions<Real> functions() {
  return {&log2_1p_of_mantissa_each<Real>,
          &exp2_m1_of_fraction_each<Real>,
          &log2_1p_each<Real>,
          &exp2_m1_each<false, Real>,
          &exp2_m1_each<true, Real>,
          &branch_each<Real>,
          &add_lmbda_terms_each<Real>};
}

template <class T>
constexpr ForType<T> for_type() {
  return {&widened_each<T>, &narrow_each<T>, &lmbda_of_row<T>};
}

}  // namespace

const MathematicsTable* NNORM_MATHEMATICS(NNORM_INSTRUCTION_SET)() {
  static const MathematicsTable table{
      functions<float>(),  functions<double>(),  for_type<float>(), for_type<double>(),
      for_type<Float16>(), for_type<BFloat16>(), &estimate,         &resolve};
  return &table;
}

}  // namespace nnorm_test
