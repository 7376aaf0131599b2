// The epilogues of BatchNormalNorm: elementwise operations that the kernels apply to y in the same pass over the
// tensors.
//
// Each epilogue is an operator of its own. This list is the only one in C++ and CUDA: the kernels, ONNX Runtime's
// operators, TensorRT's plugins, the tests and the benchmark are generated from it. A new epilogue needs a row here,
// its formula in tests/channels.h, and a line in nnorm_export/domain/__init__.py.
#pragma once

#include <cstddef>

#include "nnorm/mathematics.h"

// F(epilogue, operator, takes_residual, value). `value` is the output as a function of y = weight·ψ(scale·x + shift) +
// bias and, if takes_residual, of `residual`: the last input of the operator, of x's shape and type.
#define NNORM_FOR_EACH_EPILOGUE(F)                  \
  F(none, BatchNormalNorm, false, y)                \
  F(relu, BatchNormalNormRelu, false, rectified(y)) \
  F(add_relu, BatchNormalNormAddRelu, true, rectified(y + residual))

namespace nnorm {

#define NNORM_VALUE(epilogue, ...) epilogue,
enum class Epilogue { NNORM_FOR_EACH_EPILOGUE(NNORM_VALUE) };
#undef NNORM_VALUE

struct EpilogueFacts {
  Epilogue epilogue;
  const char* operator_name;
  bool takes_residual;
};

#define NNORM_FACTS(epilogue, name, takes_residual, value) {Epilogue::epilogue, #name, takes_residual},
inline constexpr EpilogueFacts epilogues[] = {NNORM_FOR_EACH_EPILOGUE(NNORM_FACTS)};
#undef NNORM_FACTS

template <Epilogue epilogue>
constexpr bool takes_residual = epilogues[size_t(epilogue)].takes_residual;

inline namespace NNORM_INSTRUCTION_SET {

// max(y, 0); NaN stays NaN.
template <class Real>
NNORM_INLINE Real rectified(Real y) {
  const Real zero = bounds(y).zero;
  return y < zero ? zero : y;
}

// Formula<epilogue>::apply(y, residual) is the output.
template <Epilogue epilogue>
struct Formula;

#define NNORM_FORMULA(epilogue, name, takes_residual, value)                 \
  template <>                                                                \
  struct Formula<Epilogue::epilogue> {                                       \
    template <class Real>                                                    \
    static NNORM_INLINE Real apply(Real y, [[maybe_unused]] Real residual) { \
      return value;                                                          \
    }                                                                        \
  };
NNORM_FOR_EACH_EPILOGUE(NNORM_FORMULA)
#undef NNORM_FORMULA

// The epilogue as a type, for generic lambdas.
template <Epilogue epilogue>
struct EpilogueConstant {
  static constexpr Epilogue value = epilogue;
};

// Calls f with the EpilogueConstant of an epilogue that is known at run time.
template <class F>
void with_epilogue(Epilogue epilogue, F f) {
  switch (epilogue) {
#define NNORM_CASE(epilogue, ...) \
  case Epilogue::epilogue:        \
    return f(EpilogueConstant<Epilogue::epilogue>());
    NNORM_FOR_EACH_EPILOGUE(NNORM_CASE)
#undef NNORM_CASE
  }
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
