#include "nchwc_batch_normal_norm.h"

#include "../batch_normal_norm.h"
#include "solve.h"

namespace nnorm::ort {

int64_t nchwc_block(const Attributes& attributes) {
  const int64_t block = attributes.integer("block", 0);
  if (block != 8 && block != 16) refuse("attribute block must be 8 or 16, it is " + std::to_string(block));
  return block;
}

void nchwc_batch_normal_norm(const Run& run, Epilogue epilogue, int64_t block) {
  std::vector<Shape> shapes;
  run.input<float>(0, shapes);
  if (shapes[0].size() < 3) refuse("X must be [N, C, spatial...], it is " + to_string(shapes[0]));
  if (shapes[0][1] % block != 0)
    refuse("X " + to_string(shapes[0]) + " has no whole number of blocks of " + std::to_string(block) + " channels");
  Shape shape;
  ChannelProblem<float> problem = channel_problem<float>(run, epilogue, shape);
  const std::vector<float> table = channel_table(problem, 1);
  problem.y = run.output<float>(shape);
  PerChannel<float> work = per_channel(problem, table, problem.channels);
  work.row_length = problem.extent * size_t(block);
  work.period = problem.channels / size_t(block);
  work.lanes = size_t(block);
  work.sharing = Sharing::lane;
  run_items(run, work, best_target().table<float>().per_channel);
}

}  // namespace nnorm::ort
