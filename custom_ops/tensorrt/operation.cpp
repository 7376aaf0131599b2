#include "operation.h"

#include "nnorm/same_bits.h"

namespace nnorm::trt {
namespace {

template <class T>
cudaError_t launch(ChannelProblem<T> problem, Layout layout, cudaStream_t stream) {
  if (layout == Layout::contiguous) return cuda::run(problem, stream, same_bits_wanted());
  problem.samples *= problem.extent;
  problem.extent = 1;
  constexpr size_t block = 8;
  const size_t padded = (problem.channels + block - 1) / block * block;
  const size_t lanes = layout == Layout::channels_last ? problem.channels : padded;
  return cuda::run_channels_last(problem, lanes, stream, same_bits_wanted());
}

// Problems other than ChannelProblem take the contiguous layout only.
template <class Problem>
cudaError_t launch(const Problem& problem, Layout, cudaStream_t stream) {
  return cuda::run(problem, stream, same_bits_wanted());
}

template <class Operator>
class OperationOf final : public Operation {
 public:
  OperationOf() : Operation(Operator::name, Operator::parameters.size(), Operator::operands, Operator::any_layout) {}

  std::unique_ptr<Operation> clone() const override { return std::make_unique<OperationOf>(*this); }

  std::vector<Attribute> attributes() override {
    std::vector<Attribute> result;
    operator_.for_each_attribute([&](const char* name, auto& value) { result.push_back({name, &value}); });
    return result;
  }

  std::string attribute_refusal() const override { return operator_.attribute_refusal(); }
  std::string shape_refusal(const std::vector<Tensor>& inputs) const override { return operator_.shape_refusal(inputs); }

  cudaError_t run(const std::vector<Tensor>& inputs, void* y, Type type, Layout layout, cudaStream_t stream) const override {
    switch (type) {
      case Type::float32:
        return launch(operator_.template problem<float>(inputs, y), layout, stream);
      case Type::float16:
        return launch(operator_.template problem<Float16>(inputs, y), layout, stream);
      case Type::bfloat16:
        return launch(operator_.template problem<BFloat16>(inputs, y), layout, stream);
    }
    return cudaErrorInvalidValue;
  }

 private:
  Operator operator_;
};

}  // namespace

const std::vector<std::unique_ptr<Operation>>& operations() {
  static const auto& all = *[] {
    auto created = std::make_unique<std::vector<std::unique_ptr<Operation>>>();
    for_each_operator([&](auto declared) { created->push_back(std::make_unique<OperationOf<decltype(declared)>>()); });
    return created.release();  // never destroyed: the creators refer to them
  }();
  return all;
}

}  // namespace nnorm::trt
