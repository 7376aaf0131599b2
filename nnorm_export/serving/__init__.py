"""A model repository for NVIDIA Triton Inference Server."""
