// Adds the kernels of the operators that nnorm/operators.h declares.
#include "nnorm/operators.h"

#include "operator.h"

namespace nnorm::ort {
namespace {

template <class Operator, class T>
class Kernel {
 public:
  using Signature = FloatSignature<T, Operator::parameters.size(), Operator::operands>;
  static const char* name() { return Operator::name; }

  explicit Kernel(const Attributes& attributes) : parameters_(attributes) {
    operator_.for_each_attribute([&](const char* name, auto& value) { attributes.read(name, value); });
    refuse(operator_.attribute_refusal());
  }

  void operator()(const Run& run) const {
    const Inputs<Signature> inputs(run, parameters_);
    refuse(operator_.shape_refusal(inputs));
    run.solve(operator_.template problem<T>(inputs, run.output(inputs[0].shape)), inputs.prepared());
  }

 private:
  Operator operator_;
  const Parameters<Signature> parameters_;
};

}  // namespace

void Operators::add_all() {
  for_each_operator([this](auto declared) {
    using Operator = decltype(declared);
#define NNORM_ADD(T) add<Kernel<Operator, T>>();
    NNORM_FOR_EACH_TYPE(NNORM_ADD)
#undef NNORM_ADD
  });
}

}  // namespace nnorm::ort
