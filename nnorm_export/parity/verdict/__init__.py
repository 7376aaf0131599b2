"""Whether a file passes: criteria, the allowed error of each element, the outcome. Needs NumPy, and no PyTorch."""
