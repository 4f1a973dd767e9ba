"""The engine on a GPU: attention, Triton kernels and captured decoding steps."""
