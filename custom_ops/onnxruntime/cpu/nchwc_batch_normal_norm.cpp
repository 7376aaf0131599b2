#include "nchwc_batch_normal_norm.h"

#include "solve.h"

namespace nnorm::ort {
namespace {

template <Epilogue epilogue>
class NchwcKernel {
 public:
  using Plain = BatchNormalNorm<epilogue>;
  using Signature = FloatSignature<float, Plain::parameters.size(), Plain::operands>;
  static const char* name() {
    static const std::string& text = *new std::string(std::string("Nchwc") + Plain::name);  // sessions may outlive statics
    return text.c_str();
  }

  explicit NchwcKernel(const Attributes& attributes) : parameters_(attributes) {
    attributes.read("block", block_);
    if (block_ != 8 && block_ != 16) refuse("attribute block must be 8 or 16, it is " + std::to_string(block_));
  }

  void operator()(const Run& run) const {
    const Inputs<Signature> inputs(run, parameters_);
    const Shape& x = inputs[0].shape;
    if (x.size() < 3) refuse("X must be [N, C, spatial...], it is " + to_string(x));
    if (x[1] % block_ != 0)
      refuse("X " + to_string(x) + " has no whole number of blocks of " + std::to_string(block_) + " channels");
    refuse(Plain().shape_refusal(inputs));
    const ChannelProblem<float> problem = Plain().template problem<float>(inputs, run.output(x));
    if (problem.empty()) return;
    std::vector<float> memory;
    const std::vector<float>& table = channel_table(problem, 1, inputs.prepared(), memory);
    const size_t block = size_t(block_);
    ChannelWork<float> work = channel_work(problem, table, problem.channels);
    work.row_length = problem.extent * block;
    work.period = problem.channels / block;
    work.lanes = block;
    work.sharing = Sharing::lane;
    run_items(run, work, best_instruction_set().table<float>().batch_normal_norm);
  }

 private:
  int32_t block_ = 0;
  const Parameters<Signature> parameters_;
};

}  // namespace

void add_nchwc_operators(Operators& operators) {
#define NNORM_ADD(epilogue, ...) operators.add<NchwcKernel<Epilogue::epilogue>>();
  NNORM_FOR_EACH_EPILOGUE(NNORM_ADD)
#undef NNORM_ADD
}

}  // namespace nnorm::ort
