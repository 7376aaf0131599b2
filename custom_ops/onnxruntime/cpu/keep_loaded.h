// ONNX Runtime closes the library with each session's options. An unloaded library would leak what it keeps for the
// process. On Linux and macOS the linker's flags keep it loaded (OnnxRuntimeLibrary.cmake).
#pragma once

namespace nnorm::ort {

// Has Windows keep this library until the process ends.
void keep_loaded() noexcept;

}  // namespace nnorm::ort
