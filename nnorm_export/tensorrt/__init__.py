"""From an ONNX file to a TensorRT engine, and what the engine says of itself."""
