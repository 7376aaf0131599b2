"""Training layers as one operator of PyTorch each: :mod:`.operator`, by the kernels of :mod:`.library`."""
