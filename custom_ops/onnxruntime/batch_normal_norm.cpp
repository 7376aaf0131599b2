#include "batch_normal_norm.h"

namespace nnorm::ort {
namespace {

// The names of the inputs after X, in their order (nnorm_export/operators/batch_normal_norm.py).
constexpr const char* parameter_names[] = {"scale", "shift", "exponent_pos", "exponent_neg", "weight", "bias"};

// Spatial extents below this are no length for a vectorised loop. The parameters are then repeated for each element,
// which pays where several samples share them.
constexpr size_t short_extent = 16, enough_samples = 4;

template <class T>
Tensor<const T> checked_input(const Run& run, size_t least_rank) {
  Tensor<const T> x = run.input<T>(0);
  if (x.shape.size() < least_rank)
    refuse("X must be [N, C" + std::string(least_rank > 2 ? ", spatial...]" : ", *spatial]") + ", it is " +
           to_string(x.shape));
  return x;
}

template <class T>
std::vector<Arithmetic<T>> channel_table(const Run& run, const Shape& shape, size_t repeat) {
  const size_t channels = size_t(shape[1]);
  const Arithmetic<T>* parameters[6];
  for (size_t i = 0; i < 6; ++i) {
    const Tensor<const Arithmetic<T>> parameter = run.input<Arithmetic<T>>(1 + i);
    if (parameter.shape != Shape{shape[1]})
      refuse(std::string(parameter_names[i]) + " must be [" + std::to_string(channels) + "], one number for each channel of X " +
             to_string(shape) + "; it is " + to_string(parameter.shape));
    parameters[i] = parameter.data;
  }
  std::vector<Arithmetic<T>> table(size_t(ChannelField::count) * channels * repeat);
  best_target().table<T>().prepare_channels(parameters, channels, repeat, table.data());
  return table;
}

template <class T>
const T* residual(const Run& run, const Shape& shape, Epilogue epilogue) {
  if (epilogue != Epilogue::add_relu) return nullptr;
  const Tensor<const T> tensor = run.input<T>(7);
  if (tensor.shape != shape)
    refuse("residual must have the shape of X, " + to_string(shape) + "; it is " + to_string(tensor.shape));
  return tensor.data;
}

}  // namespace

template <class T>
void batch_normal_norm(const Run& run, Epilogue epilogue) {
  const Tensor<const T> x = checked_input<T>(run, 2);
  const size_t samples = size_t(x.shape[0]), channels = size_t(x.shape[1]), extent = count(x.shape, 2);
  const bool each_its_own = extent == 1 || (extent < short_extent && samples >= enough_samples);
  const size_t repeat = each_its_own ? extent : 1;

  const std::vector<Arithmetic<T>> table = channel_table<T>(run, x.shape, repeat);
  PerChannel<T> work{};
  work.x = x.data;
  work.residual = residual<T>(run, x.shape, epilogue);
  work.y = run.output<T>(x.shape);
  work.table = table.data();
  work.table_width = channels * repeat;
  work.size = count(x.shape);
  work.row_length = each_its_own ? channels * extent : extent;
  work.period = each_its_own ? 1 : channels;
  work.sharing = each_its_own ? Sharing::element : Sharing::row;
  work.epilogue = epilogue;
  run.over_items(work, best_target().table<T>().per_channel);
}

template void batch_normal_norm<float>(const Run&, Epilogue);
template void batch_normal_norm<double>(const Run&, Epilogue);
template void batch_normal_norm<Float16>(const Run&, Epilogue);
template void batch_normal_norm<BFloat16>(const Run&, Epilogue);

int64_t nchwc_block(const Attributes& attributes) {
  const int64_t block = attributes.integer("block", 0);
  if (block != 8 && block != 16) refuse("attribute block must be 8 or 16, it is " + std::to_string(block));
  return block;
}

void nchwc_batch_normal_norm(const Run& run, Epilogue epilogue, int64_t block) {
  const Tensor<const float> x = checked_input<float>(run, 3);
  if (x.shape[1] % block != 0)
    refuse("X " + to_string(x.shape) + " has no whole number of blocks of " + std::to_string(block) + " channels");
  const std::vector<float> table = channel_table<float>(run, x.shape, 1);
  PerChannel<float> work{};
  work.x = x.data;
  work.residual = residual<float>(run, x.shape, epilogue);
  work.y = run.output<float>(x.shape);
  work.table = table.data();
  work.table_width = size_t(x.shape[1]);
  work.size = count(x.shape);
  work.row_length = count(x.shape, 2) * size_t(block);
  work.period = size_t(x.shape[1] / block);
  work.lanes = size_t(block);
  work.sharing = Sharing::lane;
  work.epilogue = epilogue;
  run.over_items(work, best_target().table<float>().per_channel);
}

}  // namespace nnorm::ort
