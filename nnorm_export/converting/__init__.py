"""From one exported ONNX file to another, without the model that it was made from."""
