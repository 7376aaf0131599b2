"""Measurements on a GPU. ``python -m benchmarks.gpu`` runs them all; kernels.cu measures the kernels alone."""
