"""Comparisons of a file with PyTorch: verify, bisect, probe, certificates, the risks of float16, and the report.

This module imports nothing, because ``verdict``, ``certificates`` and ``compare_files`` must work without PyTorch.
"""
