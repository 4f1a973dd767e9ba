"""The engine on a CPU: kernels in C, how they are built, and the operations that call them."""
