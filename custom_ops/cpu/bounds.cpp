// Defines the bounds that mathematics.h hides from the compiler (NNORM_HIDE_BOUNDS).
#include "nnorm/mathematics.h"

namespace nnorm {

const Bounds<float> bounds_of_float{0, Format<float>::greatest_magnitude};
const Bounds<double> bounds_of_double{0, Format<double>::greatest_magnitude};

}  // namespace nnorm
