"""Side-by-side measurements; a module that has a ``main`` is a command: ``python -m benchmarks.onnx_models``."""
