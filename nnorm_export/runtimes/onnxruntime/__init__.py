"""ONNX Runtime: sessions and their options, known faults, optimized files, the provider for TensorRT-RTX."""
