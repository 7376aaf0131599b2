"""The user's own metric, accuracy for example, as a gate: the file may lose only so much of it. Needs no PyTorch."""
