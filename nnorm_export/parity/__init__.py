"""Comparisons of a file with PyTorch: verify, bisect, probe, certificates, the risks of float16, and the report.

This module imports nothing, because ``certificates`` and ``judgement`` must work where PyTorch is not installed.
"""
