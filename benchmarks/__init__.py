"""Benchmarks against other libraries and against this machine's limits. Not part of the wheel; run from a checkout."""
