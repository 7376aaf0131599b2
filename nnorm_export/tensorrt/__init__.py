"""Building a TensorRT engine of an ONNX file, and reading what is in it."""
