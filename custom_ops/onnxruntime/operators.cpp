// The operators that every library of ours has.
#include "batch_normal_norm.h"
#include "layer_group_normal_norm.h"

namespace nnorm::ort {
namespace {

template <template <class> class Operator>
void add_all_types(Operators& operators) {
  operators.add<Operator, float>();
  operators.add<Operator, double>();
  operators.add<Operator, Float16>();
  operators.add<Operator, BFloat16>();
}

}  // namespace

void Operators::add_all() {
  add_all_types<BatchNormalNorm>(*this);
  add_all_types<BatchNormalNormRelu>(*this);
  add_all_types<BatchNormalNormAddRelu>(*this);
  add_all_types<LayerNormalNorm>(*this);
  add_all_types<GroupNormalNorm>(*this);
}

}  // namespace nnorm::ort
