"""Surgery on ONNX graphs: forms, fused epilogues, means, transposes, constants. Reads and writes no file."""
