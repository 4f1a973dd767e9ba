"""Structured outputs: a request's grammar is tried out in a process of its own, and compiled over a model's tokens."""
