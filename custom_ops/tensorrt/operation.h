// A node's operator, for its plugin: its attributes, and the launch of its kernel. This file depends on CUDA and the
// operators' declarations (nnorm/operators.h), not on TensorRT.
#pragma once

#include <memory>
#include <variant>

#include "nnorm/cuda_kernels.h"
#include "nnorm/operators.h"

namespace nnorm::trt {

enum class Type { float32, float16, bfloat16 };

// The order of a tensor in memory: as in ONNX, or with its channels last, without or with padding to a multiple of 8
// channels.
enum class Layout { contiguous, channels_last, channels_last_by_8 };

struct Attribute {
  const char* name;
  std::variant<int32_t*, float*> value;  // a member of the operation
};

class Operation {
 public:
  virtual ~Operation() = default;

  const char* const name;
  const int parameters;   // inputs after X, of float32
  const int operands;     // inputs after the parameters, of X's type, shape and layout
  const bool any_layout;  // else only the contiguous one

  int inputs() const { return 1 + parameters + operands; }

  virtual std::unique_ptr<Operation> clone() const = 0;
  virtual std::vector<Attribute> attributes() = 0;

  // Why the attributes are refused; empty if they are valid.
  virtual std::string attribute_refusal() const = 0;

  // Why the shapes of the inputs are refused; empty if they are valid.
  virtual std::string shape_refusal(const std::vector<Tensor>& inputs) const = 0;

  // Launches the kernel. Attributes and shapes must be valid. Shapes are those of ONNX in every layout.
  virtual cudaError_t run(const std::vector<Tensor>& inputs, void* y, Type type, Layout layout, cudaStream_t stream) const = 0;

 protected:
  Operation(const char* name_, size_t parameters_, size_t operands_, bool any_layout_)
      : name(name_), parameters(int(parameters_)), operands(int(operands_)), any_layout(any_layout_) {}
};

// Every operator, with the default values of its attributes.
const std::vector<std::unique_ptr<Operation>>& operations();

}  // namespace nnorm::trt
