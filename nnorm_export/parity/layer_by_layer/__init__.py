"""Comparisons of one normalization at a time: bisect, probe, the risks of float16."""
