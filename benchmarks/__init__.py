"""Measurements, side by side on one machine. ``python -m benchmarks`` runs them all."""

import os

# Waiting threads of PyTorch must not take the cores from the session that is timed. torch reads this when imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
