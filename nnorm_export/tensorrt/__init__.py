"""Building an engine of TensorRT or TensorRT-RTX of an ONNX file, and reading what is in it."""
