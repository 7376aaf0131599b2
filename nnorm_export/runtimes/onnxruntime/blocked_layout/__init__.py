"""ONNX Runtime's blocked layout for convolutions, in which norms between them work too."""
