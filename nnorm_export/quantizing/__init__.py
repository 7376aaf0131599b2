"""quantize(): a file in int8, in which the frozen norms between quantized tensors are tables."""
