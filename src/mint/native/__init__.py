"""The kernels in C: compiled, called and run. Knows pointers and widths, not layers, loras or caches."""
