"""C++ kernels for CPUs, where torch has no suitable kernel."""
