"""Measured choices: what serves a model fastest, or with the fewest cores, on this machine."""
