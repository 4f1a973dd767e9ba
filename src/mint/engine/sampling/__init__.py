"""Sampling: continuous batching over a KV cache with a prefix cache, and drawing of tokens."""
