"""Certificates of parity: written with PyTorch, replayed without it; bits and signatures."""
