"""Measurements, side by side on one machine. ``python -m benchmarks`` runs them all."""

import os

# Threads of PyTorch that wait must not take the cores from the session whose turn it is. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
