// serve_torchscript MODEL.pt IMAGES.pt: prints the logits of a model that nnorm_export.export_torchscript wrote.
#include <torch/script.h>

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include "tensors.h"

// The output of a model or, where that is a tuple, the first of them.
static at::Tensor first_tensor(const c10::IValue& output) {
  if (output.isTensor()) return output.toTensor();
  if (output.isTuple() && output.toTupleRef().size() > 0) return first_tensor(output.toTupleRef().elements()[0]);
  throw std::runtime_error("returns a " + output.tagKind() + ", not a tensor or a tuple of tensors");
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: serve_torchscript MODEL.pt IMAGES.pt\n");
    return 2;
  }
  try {
    const std::string model_path = argv[1], images_path = argv[2];
    const c10::InferenceMode no_gradients;
    torch::jit::Module model = naming(model_path, [&] { return torch::jit::load(model_path); });
    const at::Tensor images = read_tensor(images_path);
    print_rows(naming(model_path, [&] { return first_tensor(model.forward({images})); }));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serve_torchscript: %s\n", error.what());
    return 2;
  }
  return 0;
}
