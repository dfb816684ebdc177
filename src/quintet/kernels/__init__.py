"""Kernels of our own where torch has none that fits."""
