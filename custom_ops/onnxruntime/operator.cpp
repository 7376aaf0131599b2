#include "operator.h"

namespace nnorm::ort {

OrtStatus* infer_shape(const OrtApi* api, OrtShapeInferContext* context, size_t y_typed_as) noexcept {
  return guarded(api, "shape inference", [&] {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // borrowed
    check(api, api->ShapeInferContext_GetInputTypeShape(context, 0, &info));
    size_t rank = 0;
    check(api, api->GetDimensionsCount(info, &rank));
    if (rank == 0) return;  // a scalar, or an unknown rank, which is reported as 0 too
    Shape shape(rank);
    std::vector<const char*> names(rank);
    check(api, api->GetDimensions(info, shape.data(), rank));
    check(api, api->GetSymbolicDimensions(info, names.data(), rank));
    for (size_t i = 0; i < rank; ++i)
      if (shape[i] < 0 && (names[i] == nullptr || *names[i] == '\0')) return;
    if (y_typed_as == 0) return check(api, api->ShapeInferContext_SetOutputTypeShape(context, 0, info));
    OrtTensorTypeAndShapeInfo* like_y = nullptr;  // borrowed
    check(api, api->ShapeInferContext_GetInputTypeShape(context, y_typed_as, &like_y));
    ONNXTensorElementDataType type;
    check(api, api->GetTensorElementType(like_y, &type));
    OrtTensorTypeAndShapeInfo* of_y = nullptr;
    check(api, api->CreateTensorTypeAndShapeInfo(&of_y));
    const Owner<OrtTensorTypeAndShapeInfo> owner(of_y, api->ReleaseTensorTypeAndShapeInfo);
    check(api, api->SetTensorElementType(of_y, type));
    check(api, api->SetDimensions(of_y, shape.data(), rank));
    check(api, api->SetSymbolicDimensions(of_y, names.data(), rank));
    check(api, api->ShapeInferContext_SetOutputTypeShape(context, 0, of_y));
  });
}

}  // namespace nnorm::ort
