// What the plugins compute: the operators' names, inputs and attributes, and the way from a node's tensors to a launch.
// This file knows CUDA and no TensorRT.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nnorm/cuda_kernels.h"
#include "nnorm/operators.h"

namespace nnorm::trt {

// The attributes of all operators.
struct Attributes {
  int32_t axis = default_axis, num_groups = default_groups;
  float epsilon = default_epsilon, delta = default_delta;
};

struct Attribute {
  const char* name;
  int32_t Attributes::* integer;  // one of the two
  float Attributes::* real;
};

enum class Type { float32, float16, bfloat16 };

// How channels lie in memory: as in ONNX, or last, and then padded to a multiple of 8 or not.
enum class Layout { contiguous, channels_last, channels_last_by_8 };

// A node's tensors: X, the parameters, the operands that are like X; then Y.
struct Tensors {
  Type type;
  Layout layout;
  std::vector<Shape> shapes;  // of the inputs, as ONNX has them whatever the layout
  std::vector<const void*> inputs;
  void* y;
};

struct Operation {
  const char* name;
  int parameters;  // inputs after X, of float32
  int operands;    // inputs after those, of X's type, shape and layout
  std::vector<Attribute> attributes;
  bool any_layout;  // or only the contiguous one

  int inputs() const { return 1 + parameters + operands; }

  // Why the operator does not take inputs of these shapes; nothing if it does.
  std::string (*refusal)(const Attributes&, const std::vector<Shape>& shapes);
  // Launches; the shapes are such as refusal() lets pass.
  cudaError_t (*run)(const Attributes&, const Tensors&, cudaStream_t);
};

// BatchNormalNorm, its epilogues, LayerNormalNorm, GroupNormalNorm.
const std::vector<Operation>& operations();

}  // namespace nnorm::trt
