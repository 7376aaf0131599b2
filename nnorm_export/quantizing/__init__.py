"""quantize(): a file in int8, in which the frozen norms between quantised tensors are tables."""
