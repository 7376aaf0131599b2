#include "operator.h"

namespace nnorm::ort {

OrtStatus* infer_shape(const OrtApi* api, OrtShapeInferContext* context) noexcept {
  return guarded(api, "shape inference", [&] {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // borrowed
    check(api, api->ShapeInferContext_GetInputTypeShape(context, 0, &info));
    size_t rank = 0;
    check(api, api->GetDimensionsCount(info, &rank));
    if (rank == 0) return;  // also what an unknown rank looks like
    Shape shape(rank);
    std::vector<const char*> names(rank);
    check(api, api->GetDimensions(info, shape.data(), rank));
    check(api, api->GetSymbolicDimensions(info, names.data(), rank));
    for (size_t i = 0; i < rank; ++i)
      if (shape[i] < 0 && (names[i] == nullptr || *names[i] == '\0')) return;
    check(api, api->ShapeInferContext_SetOutputTypeShape(context, 0, info));
  });
}

}  // namespace nnorm::ort
