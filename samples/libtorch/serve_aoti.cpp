// serve_aoti MODEL.pt2 IMAGES.pt: prints the logits of a model that nnorm_export.export_aoti compiled.
//
// The package is machine code: loading it runs it. It is for the kind of processor it was compiled on, and for the
// version of LibTorch it was compiled with. Unless AOTI_RUNTIME_CHECK_INPUTS is 1 it trusts its caller: a tensor of
// another dtype or shape returns meaningless numbers.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "tensors.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: serve_aoti MODEL.pt2 IMAGES.pt\n");
    return 2;
  }
  try {
    const std::string model_path = argv[1], images_path = argv[2];
    setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", /*overwrite=*/0);
    const c10::InferenceMode no_gradients;
    auto model = naming(model_path, [&] { return torch::inductor::AOTIModelPackageLoader(model_path); });
    // Strides are part of the code: those of the example, which was contiguous.
    const at::Tensor images = read_tensor(images_path).contiguous();
    print_rows(naming(model_path, [&] { return model.run({images}).at(0); }));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serve_aoti: %s\n", error.what());
    return 2;
  }
  return 0;
}
