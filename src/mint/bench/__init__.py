"""Benchmarks against other libraries: every contender in its own process and environment, in turns, in one run."""
